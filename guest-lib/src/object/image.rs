//! Length of an image. Programs pass only a pointer; the image is sent unchanged.
//!
//! The length comes from the image's own headers. These may be damaged, so all memory is checked to be readable
//! before it is read.

use std::borrow::Cow;
use std::ffi::{CStr, c_void};
use std::marker::PhantomData;
use std::ptr;

use crate::error::{CuError, Result};
use crate::parameter::Pointer;
use crate::readable::{Known, rest_of_page};

/// `__fatBinC_Wrapper_t`: magic, version, pointer to the image. Version 2 has a pointer to the null-terminated list
/// of the images that it was linked from.
const WRAPPER_MAGIC: u32 = 0x466243B1;
const WRAPPER_OF_LINKED: u32 = 2;
/// Maximum number of images in one link.
const MOST_LINKED: usize = 4096;
/// Header of a fat binary: magic, version (2 bytes), header size (2 bytes), size of the rest (8 bytes).
const FATBIN_MAGIC: u32 = 0xBA55_ED50;
const ELF_MAGIC: [u8; 4] = *b"\x7FELF";
/// Bytes searched at a time for the end of a text.
const TEXT_STEP: usize = 64 << 10;

/// Memory of the program from an address on, of unknown length: an image, its wrapper or the wrapper's list.
#[derive(Clone, Copy)]
struct Memory<'k, 'a>(*const u8, &'k Known, PhantomData<&'a [u8]>);

impl<'a> Memory<'_, 'a> {
    /// Returns the memory at an address that a wrapper or its list contains.
    fn behind(self, header: &[u8], offset: usize) -> Result<Self> {
        let address = u64::from_le_bytes(word(header, offset)?);
        let address = usize::try_from(address).map_err(|_| CuError::INVALID_IMAGE)?;
        let address = ptr::with_exposed_provenance(address);
        Ok(Self(address, self.1, PhantomData))
    }

    fn is_null(self) -> bool {
        self.0.is_null()
    }

    fn skip(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes), self.1, PhantomData)
    }

    /// Returns the bytes up to the first that cannot be read, at most `most`.
    fn up_to(self, most: usize) -> &'a [u8] {
        let length = self.1.readable(self.0, most);
        if length == 0 {
            return &[];
        }
        // SAFETY: that much can be read. It is a part of the image or of its wrapper, which the program leaves as they
        // are during the call, or lies behind them in the same readable mapping, from which only text is read.
        unsafe { std::slice::from_raw_parts(self.0, length) }
    }

    /// Returns the first bytes, if that many can be read.
    fn first(self, length: usize) -> Result<&'a [u8]> {
        if isize::try_from(length).is_err() {
            return Err(CuError::INVALID_IMAGE);
        }
        let found = self.up_to(length);
        match found.len() == length {
            true => Ok(found),
            false => Err(CuError::INVALID_IMAGE),
        }
    }

    fn head<const N: usize>(self) -> Result<[u8; N]> {
        word(self.first(N)?, 0)
    }

    /// Returns the image that begins here.
    fn image(self) -> Result<&'a [u8]> {
        let (header, length) = match self.head::<4>() {
            Ok(magic) if u32::from_le_bytes(magic) == FATBIN_MAGIC => {
                (16, fatbin_length(&self.head()?)?)
            }
            Ok(ELF_MAGIC) => (64, elf_length(&self.head()?)?),
            // Any other image is text; its zero byte is sent too.
            _ => (0, self.text_length()?),
        };
        if length < header {
            return Err(CuError::INVALID_IMAGE);
        }
        self.first(length)
    }

    /// Returns the length of a text with its zero byte.
    fn text_length(self) -> Result<usize> {
        let (mut length, mut step) = (0, rest_of_page(self.0));
        loop {
            let part = self.skip(length).up_to(step);
            if part.is_empty() {
                return Err(CuError::INVALID_IMAGE);
            }
            if let Ok(text) = CStr::from_bytes_until_nul(part) {
                return Ok(length + text.to_bytes_with_nul().len());
            }
            length += part.len();
            step = TEXT_STEP;
        }
    }
}

/// Returns the bytes of an image, from behind its wrapper, if it has one, to its end. A linked image is followed by
/// the images that it was linked from, since a device may be unable to run the linked one.
///
/// # Errors
/// `INVALID_IMAGE`, also if the image extends into memory that cannot be read.
pub fn bytes(image: Pointer<'_, c_void>) -> Result<Cow<'_, [u8]>> {
    image.not_null()?;
    let known = Known::default();
    let start = Memory(image.as_ptr().cast_const().cast(), &known, PhantomData);
    if start.head::<4>().map(u32::from_le_bytes) != Ok(WRAPPER_MAGIC) {
        return start.image().map(Cow::Borrowed);
    }
    let wrapper = start.head::<16>()?;
    let first = start.behind(&wrapper, 8)?.image()?;
    if word(&wrapper, 4).map(u32::from_le_bytes) != Ok(WRAPPER_OF_LINKED) {
        return Ok(Cow::Borrowed(first));
    }
    let wrapper = start.head::<24>()?;
    with_inputs(first, start.behind(&wrapper, 16)?)
}

/// Concatenates a linked fat binary and the images of its null-terminated list.
fn with_inputs<'a>(linked: &'a [u8], list: Memory<'_, 'a>) -> Result<Cow<'a, [u8]>> {
    if list.is_null() {
        return Ok(Cow::Borrowed(linked));
    }
    let mut all = linked.to_vec();
    for index in 0..MOST_LINKED {
        let entry = list.skip(index * size_of::<u64>()).head::<8>()?;
        let input = list.behind(&entry, 0)?;
        if input.is_null() {
            return Ok(Cow::Owned(all));
        }
        let input = input.image()?;
        if !input.starts_with(&FATBIN_MAGIC.to_le_bytes()) {
            break;
        }
        all.resize(all.len().next_multiple_of(8), 0);
        all.extend_from_slice(input);
    }
    Err(CuError::INVALID_IMAGE)
}

fn word<const N: usize>(header: &[u8], offset: usize) -> Result<[u8; N]> {
    header
        .get(offset..offset + N)
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or(CuError::INVALID_IMAGE)
}

fn fatbin_length(header: &[u8; 16]) -> Result<usize> {
    let head = u64::from(u16::from_le_bytes(word(header, 6)?));
    let rest = u64::from_le_bytes(word(header, 8)?);
    head.checked_add(rest)
        .and_then(|length| usize::try_from(length).ok())
        .ok_or(CuError::INVALID_IMAGE)
}

/// Returns the length of an ELF image, which ends with one of its two header tables.
fn elf_length(header: &[u8; 64]) -> Result<usize> {
    let end = |offset: usize, entry: usize, count: usize| -> Result<u64> {
        let start = u64::from_le_bytes(word(header, offset)?);
        let entry = u64::from(u16::from_le_bytes(word(header, entry)?));
        let count = u64::from(u16::from_le_bytes(word(header, count)?));
        start
            .checked_add(entry * count)
            .ok_or(CuError::INVALID_IMAGE)
    };
    let programs = end(32, 54, 56)?;
    let sections = end(40, 58, 60)?;
    usize::try_from(programs.max(sections)).map_err(|_| CuError::INVALID_IMAGE)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::readable::tests::Edge;

    fn bytes<'a>(image: *const u8) -> Result<Cow<'a, [u8]>> {
        // SAFETY: each test leaves its image as it is while it uses the result.
        super::bytes(unsafe { Pointer::new(image.cast_mut().cast()) })
    }

    fn fatbin(rest: u64) -> Vec<u8> {
        let mut image = FATBIN_MAGIC.to_le_bytes().to_vec();
        image.extend(1_u16.to_le_bytes());
        image.extend(16_u16.to_le_bytes());
        image.extend(rest.to_le_bytes());
        image.resize(16 + usize::try_from(rest).unwrap(), 7);
        image
    }

    #[test]
    fn a_wrapper_leads_to_its_fat_binary() {
        let image = fatbin(24);
        let mut wrapper = Vec::new();
        wrapper.extend(WRAPPER_MAGIC.to_le_bytes());
        wrapper.extend(1_u32.to_le_bytes());
        wrapper.extend(image.as_ptr().expose_provenance().to_le_bytes());
        wrapper.extend([0; 8]);
        assert_eq!(*bytes(wrapper.as_ptr()).unwrap(), *image);
        assert_eq!(*bytes(image.as_ptr()).unwrap(), *image);
    }

    #[test]
    fn what_was_linked_is_followed_by_what_it_was_linked_of() {
        let (linked, first, second) = (fatbin(24), fatbin(8), fatbin(16));
        let list = [first.as_ptr(), second.as_ptr(), ptr::null()];
        let mut wrapper = Vec::new();
        wrapper.extend(WRAPPER_MAGIC.to_le_bytes());
        wrapper.extend(WRAPPER_OF_LINKED.to_le_bytes());
        wrapper.extend(linked.as_ptr().expose_provenance().to_le_bytes());
        wrapper.extend(list.as_ptr().expose_provenance().to_le_bytes());
        let found = bytes(wrapper.as_ptr()).unwrap();
        assert_eq!(*found, *[linked.clone(), first, second].concat());
        wrapper[16..].fill(0);
        let found = bytes(wrapper.as_ptr()).unwrap();
        assert_eq!(*found, *linked, "no list");
    }

    #[test]
    fn text_ends_with_its_zero_byte() {
        for text in [c".version 9.0", c"x", c""] {
            let found = bytes(text.as_ptr().cast()).unwrap();
            assert_eq!(*found, *text.to_bytes_with_nul());
        }
    }

    #[test]
    fn an_elf_image_ends_with_the_later_header_table() {
        let mut image = vec![0_u8; 600];
        image[..4].copy_from_slice(&ELF_MAGIC);
        image[32..40].copy_from_slice(&100_u64.to_le_bytes());
        image[40..48].copy_from_slice(&300_u64.to_le_bytes());
        for (offset, value) in [(54, 56_u16), (56, 2), (58, 64), (60, 3)] {
            image[offset..offset + 2].copy_from_slice(&value.to_le_bytes());
        }
        let found = bytes(image.as_ptr()).unwrap();
        assert_eq!(found.len(), 300 + 3 * 64);
    }

    #[test]
    fn an_impossible_length_is_an_invalid_image() {
        let mut header = [0_u8; 16];
        header[6..8].copy_from_slice(&16_u16.to_le_bytes());
        header[8..].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(fatbin_length(&header), Err(CuError::INVALID_IMAGE));
        let null = bytes(ptr::null());
        assert_eq!(null, Err(CuError::INVALID_VALUE));
    }

    const CUBIN: &[u8] = include_bytes!("../../../backend-vm/ptx/tests/data/cubin.fatbin");
    const PTX: &[u8] = include_bytes!("../../../backend-vm/ptx/tests/data/plain.fatbin");

    /// Returns the ELF image that a fat binary contains uncompressed.
    fn elf() -> &'static [u8] {
        let start = CUBIN.windows(4).position(|bytes| *bytes == ELF_MAGIC);
        let elf = &CUBIN[start.unwrap()..];
        &elf[..elf_length(&elf[..64].try_into().unwrap()).unwrap()]
    }

    /// Measures an image that ends at unreadable memory.
    fn measured(edge: &Edge, image: &[u8]) -> Result<usize> {
        let start = edge.put(image);
        let found = bytes(start)?;
        assert!(found.len() <= image.len());
        Ok(found.len())
    }

    #[test]
    fn whatever_one_byte_of_a_header_says_nothing_unreadable_is_followed() {
        let edge = Edge::new(4);
        for (image, header) in [(elf(), 64), (CUBIN, 80), (PTX, 80)] {
            assert_eq!(measured(&edge, image), Ok(image.len()));
            let mut image = image.to_vec();
            let mut refused = 0;
            for place in 0..header {
                let right = image[place];
                for wrong in 0..=u8::MAX {
                    image[place] = wrong;
                    let found = measured(&edge, &image);
                    assert!(matches!(found, Ok(_) | Err(CuError::INVALID_IMAGE)));
                    refused += usize::from(found.is_err());
                }
                image[place] = right;
            }
            assert!(refused > 1000, "{refused}");
        }
    }

    #[test]
    fn a_wrapper_that_points_nowhere_is_an_invalid_image() {
        let edge = Edge::new(1);
        let image = fatbin(24);
        let good = image.as_ptr().expose_provenance() as u64;
        let closed = edge.before_end(0).expose_provenance() as u64;
        for nowhere in [0, 1, closed, 1 << 46, 1 << 60, u64::MAX] {
            for (version, first, list) in [(1, nowhere, 0), (2, nowhere, 0), (2, good, nowhere)] {
                let mut wrapper = WRAPPER_MAGIC.to_le_bytes().to_vec();
                wrapper.extend(u32::to_le_bytes(version));
                wrapper.extend(u64::to_le_bytes(first));
                wrapper.extend(u64::to_le_bytes(list));
                let found = bytes(wrapper.as_ptr());
                let is_good = (first, list) == (good, 0);
                assert_eq!(found.is_ok(), is_good, "{first:#x} {list:#x}");
            }
        }
        for length in 0..24 {
            let mut wrapper = [0; 24];
            wrapper[..4].copy_from_slice(&WRAPPER_MAGIC.to_le_bytes());
            wrapper[4] = 2;
            wrapper[8..16].copy_from_slice(&good.to_le_bytes());
            assert!(measured(&edge, &wrapper[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn a_text_without_an_end_is_an_invalid_image() {
        let edge = Edge::new(40);
        for length in [1, 3, 4096, TEXT_STEP, TEXT_STEP + 1] {
            let mut text = vec![b'x'; length];
            assert_eq!(measured(&edge, &text), Err(CuError::INVALID_IMAGE));
            text.push(0);
            assert_eq!(measured(&edge, &text), Ok(length + 1));
        }
    }

    proptest! {
        #[test]
        fn whatever_bytes_are_damaged_nothing_unreadable_is_followed(
            damage in prop::collection::vec((0..64_usize, any::<u8>()), 1..32),
            cut in 0..64_usize,
        ) {
            let edge = Edge::new(4);
            for image in [elf(), CUBIN, PTX] {
                let mut image = image.to_vec();
                for (place, byte) in &damage {
                    image[*place] = *byte;
                }
                let _ = measured(&edge, &image);
                let _ = measured(&edge, &image[..cut]);
            }
        }
    }
}
