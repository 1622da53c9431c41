//! Where an image ends. Programs pass a pointer; its bytes travel as they are.

use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_void};

use crate::error::{CuError, Result};

/// `__fatBinC_Wrapper_t`: magic, version, pointer to the image; in version 2 a pointer to the list, which
/// ends with null, of the images that it was linked of.
const WRAPPER_MAGIC: u32 = 0x466243B1;
const WRAPPER_OF_LINKED: u32 = 2;
/// Most images of one link.
const MOST_LINKED: usize = 4096;
/// The header of a fat binary: magic, version (2 bytes), header size (2 bytes), size behind it (8 bytes).
const FATBIN_MAGIC: u32 = 0xBA55_ED50;
const ELF_MAGIC: [u8; 4] = *b"\x7FELF";

/// The bytes of the image that a program passed: behind its wrapper if it has one, to its own end. What was
/// linked of several images is followed by these, since a device may not run what was linked.
///
/// # Safety
/// `image` points to a fat binary, its wrapper, an ELF image, or PTX text that ends with a zero byte, and
/// stays as it is while the result is in use.
pub unsafe fn bytes<'a>(image: *const c_void) -> Result<Cow<'a, [u8]>> {
    if image.is_null() {
        return Err(CuError::INVALID_VALUE);
    }
    let start: *const u8 = image.cast();
    // SAFETY: every image is at least four bytes long; a shorter PTX text ends before it is compared on.
    let magic = unsafe { prefix(start) };
    if u32::from_le_bytes(magic) == WRAPPER_MAGIC {
        // SAFETY: a wrapper has its image's address at offset 8.
        let inner = unsafe { image.byte_add(8).cast::<*const c_void>().read_unaligned() };
        if inner.is_null() {
            return Err(CuError::INVALID_IMAGE);
        }
        // SAFETY: the wrapper points to an image.
        let first = unsafe { bytes_behind(inner.cast()) }?;
        // SAFETY: a wrapper has its version at offset 4.
        if unsafe { image.byte_add(4).cast::<u32>().read_unaligned() } != WRAPPER_OF_LINKED {
            return Ok(Cow::Borrowed(first));
        }
        // SAFETY: this version of a wrapper has the address of the list at offset 16.
        let list = unsafe {
            image
                .byte_add(16)
                .cast::<*const *const u8>()
                .read_unaligned()
        };
        // SAFETY: the wrapper points to it.
        return unsafe { with_inputs(first, list) };
    }
    // SAFETY: it is an image itself.
    unsafe { bytes_behind(start) }.map(Cow::Borrowed)
}

/// A linked fat binary and those in the list.
///
/// # Safety
/// The list is null or ends with null; what it points to are fat binaries.
unsafe fn with_inputs<'a>(linked: &'a [u8], list: *const *const u8) -> Result<Cow<'a, [u8]>> {
    if list.is_null() {
        return Ok(Cow::Borrowed(linked));
    }
    let mut all = linked.to_vec();
    for index in 0..MOST_LINKED {
        // SAFETY: the list goes on until its null.
        let input = unsafe { list.add(index).read_unaligned() };
        if input.is_null() {
            return Ok(Cow::Owned(all));
        }
        // SAFETY: as the caller promises.
        let input = unsafe { bytes_behind(input) }?;
        if !input.starts_with(&FATBIN_MAGIC.to_le_bytes()) {
            break;
        }
        all.resize(all.len().next_multiple_of(8), 0);
        all.extend_from_slice(input);
    }
    Err(CuError::INVALID_IMAGE)
}

/// The first four bytes; those behind a zero byte are taken for zero.
unsafe fn prefix(start: *const u8) -> [u8; 4] {
    let mut magic = [0; 4];
    for (index, place) in magic.iter_mut().enumerate() {
        // SAFETY: no byte behind a terminating zero is read.
        *place = unsafe { start.add(index).read() };
        if *place == 0 {
            break;
        }
    }
    magic
}

unsafe fn bytes_behind<'a>(start: *const u8) -> Result<&'a [u8]> {
    // SAFETY: as the caller promises.
    let magic = unsafe { prefix(start) };
    let length = if u32::from_le_bytes(magic) == FATBIN_MAGIC {
        // SAFETY: a fat binary starts with a header of 16 bytes.
        let header: [u8; 16] = unsafe { start.cast::<[u8; 16]>().read() };
        fatbin_length(&header)?
    } else if magic == ELF_MAGIC {
        // SAFETY: an ELF image starts with a header of 64 bytes.
        let header: [u8; 64] = unsafe { start.cast::<[u8; 64]>().read() };
        elf_length(&header)?
    } else {
        // SAFETY: anything else is text that ends with a zero byte, which travels with it.
        unsafe { CStr::from_ptr(start.cast::<c_char>()) }
            .to_bytes_with_nul()
            .len()
    };
    // SAFETY: the image says so of itself.
    Ok(unsafe { std::slice::from_raw_parts(start, length) })
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

/// An ELF image ends with one of its two header tables.
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
    use super::*;

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
        // SAFETY: wrapper and image outlive the slices.
        unsafe {
            assert_eq!(*bytes(wrapper.as_ptr().cast()).unwrap(), *image);
            assert_eq!(*bytes(image.as_ptr().cast()).unwrap(), *image);
        }
    }

    #[test]
    fn what_was_linked_is_followed_by_what_it_was_linked_of() {
        let (linked, first, second) = (fatbin(24), fatbin(8), fatbin(16));
        let list = [first.as_ptr(), second.as_ptr(), std::ptr::null()];
        let mut wrapper = Vec::new();
        wrapper.extend(WRAPPER_MAGIC.to_le_bytes());
        wrapper.extend(WRAPPER_OF_LINKED.to_le_bytes());
        wrapper.extend(linked.as_ptr().expose_provenance().to_le_bytes());
        wrapper.extend(list.as_ptr().expose_provenance().to_le_bytes());
        // SAFETY: wrapper, list and images outlive the result.
        let found = unsafe { bytes(wrapper.as_ptr().cast()) }.unwrap();
        assert_eq!(*found, *[linked.clone(), first, second].concat());
        wrapper[16..].fill(0);
        // SAFETY: as above.
        let found = unsafe { bytes(wrapper.as_ptr().cast()) }.unwrap();
        assert_eq!(*found, *linked, "no list");
    }

    #[test]
    fn text_ends_with_its_zero_byte() {
        for text in [c".version 9.0", c"x", c""] {
            // SAFETY: the text is static.
            let found = unsafe { bytes(text.as_ptr().cast()) }.unwrap();
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
        // SAFETY: the image outlives the slice.
        let found = unsafe { bytes(image.as_ptr().cast()) }.unwrap();
        assert_eq!(found.len(), 300 + 3 * 64);
    }

    #[test]
    fn an_impossible_length_is_an_invalid_image() {
        let mut header = [0_u8; 16];
        header[6..8].copy_from_slice(&16_u16.to_le_bytes());
        header[8..].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(fatbin_length(&header), Err(CuError::INVALID_IMAGE));
        // SAFETY: null is refused before it is followed.
        let null = unsafe { bytes(std::ptr::null()) };
        assert_eq!(null, Err(CuError::INVALID_VALUE));
    }
}
