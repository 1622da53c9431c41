//! Extracts device code from a guest's image and checks it before the driver reads it.
//!
//! An image is an ELF file of machine code, a fat binary, several fat binaries (of a relocatable link), or PTX. The
//! driver trusts the lengths in a fat binary's headers, and it follows the pointers of an image that begins like a
//! `__fatBinC_Wrapper_t` (both measured on driver 580: it crashes on addresses in the image). So it never loads a
//! container from a guest: this module extracts the code, in the driver's own order of preference, and passes on an
//! ELF file that contains all that its headers name, or text. The driver's linker reads libraries as containers, once
//! [`library::check`](crate::library::check) has checked all that they contain.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};

use memchr::memmem;
use wormhole_api::constants::jit_input;
use wormhole_device::{CuError, Result};
use wormhole_fatbin::{Entry, entries, fatbins, is_fatbin};

use crate::printing::{self, Printing};
use crate::{elf, managed};

/// Greatest size of an image's decompressed code.
const MAX_BYTES: u64 = 1 << 30;
/// Greatest size of the decompressed code that all loads of a process hold at a time.
const MAX_HELD: u64 = 4 << 30;

/// Checked code for the driver.
#[derive(Debug)]
pub struct Code<'a> {
    bytes: Cow<'a, [u8]>,
    is_machine: bool,
    _held: Option<Held<'a>>,
}

impl<'a> Code<'a> {
    /// Checks code outside a container.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_IMAGE`: the code is neither a whole ELF file for a GPU nor text.
    pub fn new(bytes: Cow<'a, [u8]>) -> Result<Self> {
        let is_machine = elf::is_elf(&bytes);
        let bytes = if is_machine {
            elf::is_whole(&bytes).then_some(bytes)
        } else {
            text(bytes)
        };
        Ok(Self {
            bytes: bytes.ok_or(CuError::INVALID_IMAGE)?,
            is_machine,
            _held: None,
        })
    }

    /// Checks machine code outside a container.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_IMAGE`: the code is no whole ELF file for a GPU.
    pub fn machine(bytes: Cow<'a, [u8]>) -> Result<Self> {
        let code = Self::new(bytes)?;
        code.is_machine
            .then_some(code)
            .ok_or(CuError::INVALID_IMAGE)
    }

    /// ELF file, or text that ends in a zero byte.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn is_machine(&self) -> bool {
        self.is_machine
    }

    /// Returns the `CUjitInputType` of this code.
    pub fn link_kind(&self) -> u32 {
        if self.is_machine {
            jit_input::CUBIN
        } else {
            jit_input::PTX
        }
    }

    /// Returns which kernels may print or assert.
    pub fn output(&self) -> Printing {
        let names = |name: &str| memmem::find(&self.bytes, name.as_bytes()).is_some();
        if names("vprintf") {
            let found = match self.is_machine {
                true => printing::of_machine_code(&self.bytes),
                false => printing::of_text(&self.bytes),
            };
            // A kernel that launches others does not name them.
            let found = found.filter(|_| !names("cudaLaunchDevice") && !names("__cudaCDP"));
            found.map_or(Printing::Any, Printing::Kernels)
        } else if names("__assertfail") {
            Printing::Kernels(HashSet::new())
        } else {
            Printing::None
        }
    }

    /// Returns whether the code may have managed variables.
    pub fn names_managed(&self) -> bool {
        if self.is_machine {
            managed::are_in(&self.bytes)
        } else {
            memmem::find(&self.bytes, b".managed").is_some()
        }
    }
}

/// First bytes of an archive (ar(5)), which has lengths in it although it can be text.
const ARCHIVE: &str = "!<";

/// Returns whether a text has no control characters but white space.
fn is_text(written: &str) -> bool {
    if !written.is_ascii() {
        return written
            .chars()
            .all(|letter| !letter.is_control() || letter.is_ascii_whitespace());
    }
    // Without an exit in each piece the compiler looks at many bytes at a time.
    let is_letter = |byte: &u8| !byte.is_ascii_control() | byte.is_ascii_whitespace();
    let mut pieces = written.as_bytes().chunks(64);
    pieces.all(|piece| piece.iter().fold(true, |all, byte| all & is_letter(byte)))
}

/// Terminates PTX by a zero byte. `None` if a control character precedes the end: such bytes are not text.
fn text(bytes: Cow<'_, [u8]>) -> Option<Cow<'_, [u8]>> {
    let end = memchr::memchr(0, &bytes).unwrap_or(bytes.len());
    let written = std::str::from_utf8(&bytes[..end]).ok()?;
    let is_other = written.is_empty() || written.starts_with(ARCHIVE);
    if is_other || !is_text(written) {
        return None;
    }
    Some(match bytes {
        Cow::Borrowed(bytes) if end < bytes.len() => Cow::Borrowed(&bytes[..=end]),
        bytes => {
            let mut owned = bytes.into_owned();
            owned.truncate(end);
            owned.push(0);
            Cow::Owned(owned)
        }
    })
}

/// Way to load an image.
#[derive(Debug)]
pub enum Alternative<'a> {
    /// Image that is code itself.
    Plain(&'a [u8]),
    /// Entry of a fat binary.
    Entry(Entry<'a>),
    /// Code that must be linked first, one entry of each fat binary.
    Linked(Vec<Entry<'a>>),
}

/// Lists the ways to load an image on a device of compute capability `arch` (90 for 9.0), best first. Empty if a fat
/// binary has no code for the device.
///
/// # Errors
/// `CUDA_ERROR_INVALID_IMAGE`: a fat binary's headers are damaged.
pub fn alternatives(image: &[u8], arch: u32, force_ptx: bool) -> Result<Vec<Alternative<'_>>> {
    if !is_fatbin(image) {
        return Ok(vec![Alternative::Plain(image)]);
    }
    let fatbins = fatbins(image).map_err(|_| CuError::INVALID_IMAGE)?;
    let Some((first, inputs)) = fatbins.split_first() else {
        return Err(CuError::INVALID_IMAGE);
    };
    let ranked = |fatbin| ranked(fatbin, arch, force_ptx);
    let mut all: Vec<_> = ranked(first)?.into_iter().map(Alternative::Entry).collect();
    // The first fat binary is the link of the others.
    let inputs = inputs
        .iter()
        .map(|input| Ok(ranked(input)?.into_iter().next()))
        .collect::<Result<Option<Vec<_>>>>()?;
    all.extend(
        inputs
            .filter(|inputs| !inputs.is_empty())
            .map(Alternative::Linked),
    );
    Ok(all)
}

/// Lists the entries of a fat binary that run on a device: machine code before PTX, the best of each first.
fn ranked(fatbin: &[u8], arch: u32, force_ptx: bool) -> Result<Vec<Entry<'_>>> {
    let mut entries = entries(fatbin).map_err(|_| CuError::INVALID_IMAGE)?;
    entries.retain(|entry| entry.runs_on(arch) && (entry.is_ptx() || entry.is_elf() && !force_ptx));
    entries.sort_by_cached_key(|entry| std::cmp::Reverse((entry.is_elf(), entry.preference())));
    Ok(entries)
}

/// Counts the decompressed bytes of all attempts to load one image, or of all inputs of a link, one after the other.
#[derive(Debug, Default)]
pub struct Attempts(u64);

impl Attempts {
    /// Counts the bytes of another attempt.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`: the attempts together decompress too much. An image has thousands of entries, and
    /// each compressed byte stands for up to a thousand others.
    pub fn begin(&mut self, way: &Alternative<'_>) -> Result<()> {
        let entries = match way {
            Alternative::Plain(_) => &[],
            Alternative::Entry(entry) => std::slice::from_ref(entry),
            Alternative::Linked(entries) => &entries[..],
        };
        entries.iter().try_for_each(|entry| self.add(entry))
    }

    /// Counts the bytes of an entry.
    ///
    /// # Errors
    /// As of [`Self::begin`].
    pub fn add(&mut self, entry: &Entry<'_>) -> Result<()> {
        self.0 = self.0.saturating_add(entry.unpacked_bytes());
        if self.0 > MAX_HELD {
            return Err(CuError::OUT_OF_MEMORY);
        }
        Ok(())
    }
}

/// Size in bytes of the decompressed code in use.
#[derive(Debug, Default)]
pub struct Budget(AtomicU64);

/// Share of a budget, returned on drop.
#[derive(Debug)]
struct Held<'a> {
    budget: &'a Budget,
    bytes: u64,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.budget.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Budget {
    fn hold(&self, bytes: u64) -> Result<Held<'_>> {
        let fits = |held: u64| held.checked_add(bytes).filter(|sum| *sum <= MAX_HELD);
        self.0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map_err(|_| CuError::OUT_OF_MEMORY)?;
        Ok(Held {
            budget: self,
            bytes,
        })
    }

    /// Decompresses the content of an entry.
    fn content<'a>(&'a self, entry: &Entry<'a>) -> Result<(Held<'a>, Cow<'a, [u8]>)> {
        let bytes = entry.unpacked_bytes();
        if bytes > MAX_BYTES {
            return Err(CuError::OUT_OF_MEMORY);
        }
        let held = self.hold(bytes)?;
        let limit = usize::try_from(bytes).map_err(|_| CuError::OUT_OF_MEMORY)?;
        let content = entry.unpack(limit).map_err(|_| CuError::INVALID_IMAGE)?;
        Ok((held, content))
    }

    /// Extracts the code of an entry.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`: the code is too large, or the budget is spent. `CUDA_ERROR_INVALID_IMAGE`: the
    /// entry does not decompress, or its content is not code.
    pub fn unpack<'a>(&'a self, entry: &Entry<'a>) -> Result<Code<'a>> {
        let (held, content) = self.content(entry)?;
        let mut code = Code::new(content)?;
        if code.is_machine != entry.is_elf() {
            return Err(CuError::INVALID_IMAGE);
        }
        code._held = Some(held);
        Ok(code)
    }

    /// Checks an entry that the driver decompresses itself.
    ///
    /// # Errors
    /// As of [`Self::unpack`]. `CUDA_ERROR_INVALID_IMAGE` also: the entry is neither PTX nor machine code, its text does not
    /// end in a zero byte, or its header has more than is known.
    pub fn check(&self, entry: &Entry<'_>) -> Result<()> {
        let (_held, content) = self.content(entry)?;
        let is_known = entry.is_elf() || entry.is_ptx() && content.contains(&0);
        let code = Code::new(content)?;
        if !entry.is_usual() || !is_known || code.is_machine != entry.is_elf() {
            return Err(CuError::INVALID_IMAGE);
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub const PTX: u16 = 1;
    pub const ELF: u16 = 2;
    const LZ4: u64 = 0x2000;
    pub const ZSTD: u64 = 0x8000;

    pub fn part(kind: u16, arch: u32, flags: u64, payload: &[u8], decompressed: usize) -> Vec<u8> {
        let padded = payload.len().next_multiple_of(8);
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&kind.to_le_bytes());
        bytes.extend_from_slice(&0x101_u16.to_le_bytes());
        bytes.extend_from_slice(&64_u32.to_le_bytes());
        bytes.extend_from_slice(&(padded as u64).to_le_bytes());
        bytes.extend_from_slice(&u32::try_from(payload.len()).expect("small").to_le_bytes());
        bytes.resize(28, 0);
        bytes.extend_from_slice(&arch.to_le_bytes());
        bytes.resize(40, 0);
        bytes.extend_from_slice(&flags.to_le_bytes());
        bytes.resize(56, 0);
        bytes.extend_from_slice(&(decompressed as u64).to_le_bytes());
        bytes.extend_from_slice(payload);
        bytes.resize(64 + padded, 0);
        bytes
    }

    pub fn fatbin(parts: &[Vec<u8>]) -> Vec<u8> {
        let body = parts.concat();
        let mut bytes = b"\x50\xed\x55\xba\x01\x00\x10\x00".to_vec();
        bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    const ZSTD_OF_DRIVER: u64 = ZSTD | 0x11;
    const SPECIFIC: u64 = 0x10_0000;
    const FAMILY: u64 = 0x20_0000;

    /// Architectures of the entries in the order of attempts; PTX is negative.
    fn order(parts: &[Vec<u8>], arch: u32, force_ptx: bool) -> Vec<i32> {
        let image = fatbin(parts);
        let ways = alternatives(&image, arch, force_ptx).unwrap();
        let architecture = |way: &Alternative<'_>| match way {
            Alternative::Entry(entry) => {
                let architecture = i32::try_from(entry.architecture()).unwrap();
                if entry.is_elf() {
                    architecture
                } else {
                    -architecture
                }
            }
            other => panic!("{other:?}"),
        };
        ways.iter().map(architecture).collect()
    }

    #[test]
    fn machine_code_of_the_major_version_comes_before_ptx() {
        let parts = [80, 86, 90, 100].map(|arch| part(ELF, arch, 0, b"code", 0));
        let ptx = [70, 90].map(|arch| part(PTX, arch, 0, b"text", 0));
        let all = [&parts[..], &ptx].concat();
        assert_eq!(order(&all, 86, false), [86, 80, -70]);
        assert_eq!(order(&all, 90, false), [90, -90, -70]);
        assert_eq!(order(&all, 90, true), [-90, -70]);
        assert_eq!(order(&all, 120, false), [-90, -70]);
        assert!(order(&parts, 75, false).is_empty());
    }

    #[test]
    fn code_with_specific_features_runs_on_its_architecture_alone() {
        let parts = [
            part(ELF, 100, 0, b"plain", 0),
            part(ELF, 100, FAMILY, b"family", 0),
            part(ELF, 100, SPECIFIC, b"specific", 0),
            part(PTX, 100, SPECIFIC, b"text", 0),
            part(PTX, 100, FAMILY, b"text", 0),
        ];
        assert_eq!(order(&parts, 100, false).len(), 5);
        assert_eq!(order(&parts, 103, false), [100, 100, -100]);
        assert_eq!(order(&parts, 120, false), [] as [i32; 0]);
        let image = fatbin(&parts);
        let ways = alternatives(&image, 100, false).unwrap();
        let payload = |way: &Alternative<'_>| match way {
            Alternative::Entry(entry) => entry.unpack(16).unwrap().into_owned(),
            other => panic!("{other:?}"),
        };
        let payloads: Vec<_> = ways.iter().take(3).map(payload).collect();
        assert!(payloads[0].starts_with(b"specific"));
        assert!(payloads[1].starts_with(b"family"));
        assert!(payloads[2].starts_with(b"plain"));
    }

    #[test]
    fn relocatable_code_is_linked_of_the_inputs_unless_its_link_is_there() {
        let linked = fatbin(&[part(ELF, 80, 0, b"linked", 0)]);
        let input = fatbin(&[part(PTX, 80, 0, b"text", 0)]);
        let image = [&linked[..], &input, &input].concat();
        let ways = alternatives(&image, 80, false).unwrap();
        assert!(matches!(
            &ways[..],
            [Alternative::Entry(_), Alternative::Linked(inputs)] if inputs.len() == 2
        ));
        let ways = alternatives(&image, 90, false).unwrap();
        assert!(matches!(&ways[..], [Alternative::Linked(_)]));
    }

    fn unpacked(parts: &[Vec<u8>]) -> Result<Vec<u8>> {
        let image = fatbin(parts);
        let ways = alternatives(&image, 90, false)?;
        let Some(Alternative::Entry(entry)) = ways.first() else {
            return Err(CuError::NO_BINARY_FOR_GPU);
        };
        Ok(Budget::default().unpack(entry)?.bytes().to_vec())
    }

    const TEXT: &[u8] = b".version 8.0 // text text text text text";

    #[test]
    fn compressed_text_is_unpacked_and_ended() {
        let expected = [TEXT, b"\0"].concat();
        let lz4 = lz4_flex::block::compress(TEXT);
        let level = ruzstd::encoding::CompressionLevel::Fastest;
        let zstd = ruzstd::encoding::compress_to_vec(TEXT, level);
        let packed = |flags, data: &[u8]| unpacked(&[part(PTX, 75, flags, data, TEXT.len())]);
        assert_eq!(packed(LZ4, &lz4).unwrap(), expected);
        assert_eq!(packed(ZSTD_OF_DRIVER, &zstd).unwrap(), expected);
        for (flags, data) in [(LZ4, &lz4), (ZSTD, &zstd)] {
            for bytes in [0, TEXT.len() - 1, TEXT.len() + 1] {
                let other = part(PTX, 75, flags, data, bytes);
                let refused = unpacked(&[other]);
                assert_eq!(refused, Err(CuError::INVALID_IMAGE), "{flags:#x} {bytes}");
            }
        }
        // Another reader would find more, or something else.
        for (flags, data) in [
            (ZSTD, [&zstd[..], b"\0"].concat()),
            (ZSTD, [&zstd[..], &zstd].concat()),
            (ZSTD | LZ4, zstd.clone()),
            (ZSTD | LZ4, lz4.clone()),
        ] {
            assert_eq!(packed(flags, &data), Err(CuError::INVALID_IMAGE));
        }
    }

    #[test]
    fn an_entry_is_what_it_says() {
        for (kind, data) in [
            (ELF, TEXT),
            (PTX, b"\x7fELF of a kind"),
            (PTX, b"BC\xc0\xde"),
        ] {
            let wrong = part(kind, 90, 0, data, 0);
            assert_eq!(unpacked(&[wrong]), Err(CuError::INVALID_IMAGE));
        }
        let large = part(PTX, 90, ZSTD, TEXT, 2 << 30);
        assert_eq!(unpacked(&[large]), Err(CuError::OUT_OF_MEMORY));
    }

    #[test]
    fn only_so_much_is_unpacked_at_once() {
        let budget = Budget::default();
        let held: Vec<_> = (0..4).map(|_| budget.hold(MAX_BYTES).unwrap()).collect();
        assert_eq!(budget.hold(1).err(), Some(CuError::OUT_OF_MEMORY));
        drop(held);
        assert!(budget.hold(MAX_HELD).is_ok());
    }

    #[test]
    fn the_attempts_to_load_one_image_unpack_only_so_much_together() {
        let large = || part(PTX, 90, ZSTD, TEXT, 1 << 30);
        let image = fatbin(&[large(), large(), large(), large(), large()]);
        let ways = alternatives(&image, 90, false).unwrap();
        let mut attempts = Attempts::default();
        let mut results = ways.iter().map(|way| attempts.begin(way));
        assert!(results.by_ref().take(4).all(|result| result.is_ok()));
        assert_eq!(results.next(), Some(Err(CuError::OUT_OF_MEMORY)));
        let linked = [&fatbin(&[])[..], &image, &image, &image, &image, &image].concat();
        let ways = alternatives(&linked, 90, false).unwrap();
        assert!(matches!(&ways[..], [Alternative::Linked(inputs)] if inputs.len() == 5));
        let begun = Attempts::default().begin(&ways[0]);
        assert_eq!(begun, Err(CuError::OUT_OF_MEMORY));
        assert_eq!(Attempts::default().begin(&Alternative::Plain(TEXT)), Ok(()));
    }

    #[test]
    fn a_text_has_no_control_characters_wherever_they_are() {
        for before in ["", "é", "\t\r\n \u{c}"] {
            for length in [0, 1, 63, 64, 65, 1000] {
                let written = format!("{before}{}", "x".repeat(length));
                assert!(is_text(&written), "{length}");
                for control in ['\u{1}', '\u{b}', '\u{1f}', '\u{7f}', '\u{85}'] {
                    assert!(!is_text(&format!("{written}{control}")), "{length}");
                    assert!(!is_text(&format!("{control}{written}")), "{length}");
                }
            }
        }
    }

    #[test]
    fn nothing_with_pointers_in_it_is_code() {
        let code =
            |bytes: &[u8]| Code::new(Cow::Owned(bytes.to_vec())).map(|code| code.bytes().to_vec());
        // `__fatBinC_Wrapper_t`, and other first words that the driver recognizes.
        let wrapper = [
            &0x4662_43b1_u32.to_le_bytes()[..],
            &[1, 0, 0, 0],
            &[0x78; 16],
        ]
        .concat();
        for wrong in [
            &wrapper[..],
            &0x1ee5_5a01_u32.to_le_bytes(),
            b"\x7fELF",
            b"",
            b"\0",
            b"!<arch>\nmember.o/       0           0     0     644     99999999  `\n",
        ] {
            assert_eq!(code(wrong), Err(CuError::INVALID_IMAGE), "{wrong:?}");
        }
        assert_eq!(
            code(b".version 8.0\n\t// \xc3\xa9").unwrap(),
            b".version 8.0\n\t// \xc3\xa9\0"
        );
        assert_eq!(code(b".version 8.0\0\x01").unwrap(), b".version 8.0\0");
    }

    #[test]
    fn code_is_searched_for_output_and_managed_variables() {
        let code = |text: &'static [u8]| Code::new(Cow::Borrowed(text)).unwrap();
        let printing = |kernel| Printing::Kernels(HashSet::from_iter(kernel));
        let text = b".entry k() { call (r), vprintf, (a, b); } .entry l() { ret; }";
        assert_eq!(code(text).output(), printing(vec!["k".to_owned()]));
        let launching = b".entry k() { call (r), vprintf, (a, b); call cudaLaunchDeviceV2; }";
        assert_eq!(code(launching).output(), Printing::Any);
        assert_eq!(code(b"call __assertfail").output(), printing(vec![]));
        assert_eq!(code(b"call printer").output(), Printing::None);
        assert!(code(b".global .attribute(.managed) .b32 x;").names_managed());
        assert!(!code(b".global .b32 x;").names_managed());
    }
}
