//! Finds the kernels of an image that may print: those from which `vprintf` is called.
//!
//! In a linked ELF file the call graph (section `.nv.callgraph`) names the kernel itself as the caller, also where the
//! call is in a function of the kernel that was not inlined. In a relocatable file, and in PTX, functions are callers
//! too. Kernels of any image can reach such a function by its address, so the answer is then unknown. (Both as `ptxas`
//! 13 writes them.)

use std::collections::HashSet;

use object::LittleEndian;
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, SectionHeader, Sym};
use wormhole_device::ImageOutput;

/// Kernels of an image that may print.
#[derive(Debug, PartialEq, Eq)]
pub enum Printing {
    /// Nothing prints or asserts.
    None,
    /// Kernels may assert. These may print as well.
    Kernels(HashSet<String>),
    /// Unknown: any kernel may print.
    Any,
}

impl Printing {
    /// Returns this without the names.
    pub fn summary(&self) -> ImageOutput {
        match self {
            Self::None => ImageOutput::None,
            Self::Kernels(_) => ImageOutput::Kernels,
            Self::Any => ImageOutput::Any,
        }
    }
}

const VPRINTF: &[u8] = b"vprintf";
/// Type of the call graph's section: pairs of symbols, the caller and the callee.
const CALL_GRAPH: u32 = 0x7000_0001;
/// Bit of `st_other` in the symbol of a kernel (`STO_CUDA_ENTRY`).
const ENTRY: u8 = 0x10;
/// Callees from here on are marks between the lists of the call graph. The first list has the calls.
const FIRST_MARK: u32 = 0xffff_fff0;
/// Most bytes of all names. Names in a file may overlap, so a small file can have large ones.
const MOST_NAMES: usize = 16 << 20;

/// Returns the kernels of an ELF file that call `vprintf`. `None` if that is unknown, or the names are too long.
pub fn of_machine_code(image: &[u8]) -> Option<HashSet<String>> {
    kernels(image, MOST_NAMES)
}

fn kernels(image: &[u8], most_names: usize) -> Option<HashSet<String>> {
    let header = FileHeader64::<LittleEndian>::parse(image).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, image).ok()?;
    let symbols = sections
        .symbols(endian, image, object::elf::SHT_SYMTAB)
        .ok()?;
    let (mut kernels, mut left) = (HashSet::new(), most_names);
    for section in sections
        .iter()
        .filter(|section| section.sh_type(endian) == CALL_GRAPH)
    {
        let (pairs, []) = section.data(endian, image).ok()?.as_chunks::<4>() else {
            return None;
        };
        for pair in pairs.chunks(2) {
            let [caller, callee] = *pair else {
                return None;
            };
            let (caller, callee) = (u32::from_le_bytes(caller), u32::from_le_bytes(callee));
            if callee >= FIRST_MARK {
                continue;
            }
            let symbol = |index: u32| symbols.symbol(object::SymbolIndex(index as usize)).ok();
            if symbol(callee)?.name(endian, symbols.strings()).ok()? != VPRINTF {
                continue;
            }
            let caller = symbol(caller)?;
            if caller.st_other() & ENTRY == 0 {
                return None;
            }
            let name = str::from_utf8(caller.name(endian, symbols.strings()).ok()?).ok()?;
            if !kernels.contains(name) {
                left = left.checked_sub(name.len())?;
                kernels.insert(name.to_owned());
            }
        }
    }
    // The name is in the file, so somebody must call it.
    (!kernels.is_empty()).then_some(kernels)
}

/// Returns the kernels of PTX that call `vprintf`. `None` if that is unknown.
pub fn of_text(text: &[u8]) -> Option<HashSet<String>> {
    let text = without_comments(std::str::from_utf8(text).ok()?)?;
    let is_separator =
        |letter: char| !(letter.is_ascii_alphanumeric() || "_$.%{}".contains(letter));
    let (mut kernels, mut depth, mut entry) = (HashSet::new(), 0_usize, None);
    let mut words = text
        .split(is_separator)
        .flat_map(|word| word.split_inclusive(['{', '}']))
        .flat_map(|word| match word.strip_suffix(['{', '}']) {
            Some(name) => [name, &word[name.len()..]],
            None => [word, ""],
        })
        .filter(|word| !word.is_empty());
    while let Some(word) = words.next() {
        match word {
            "{" => depth += 1,
            "}" => depth = depth.checked_sub(1)?,
            ".entry" if depth == 0 => entry = Some(words.next()?),
            ".func" if depth == 0 => entry = None,
            "vprintf" if depth > 0 => _ = kernels.insert(entry?.to_owned()),
            _ => {}
        }
    }
    Some(kernels)
}

/// Replaces comments and strings by spaces. `None` if one does not end, or if a quote is escaped.
fn without_comments(mut text: &str) -> Option<String> {
    if text.contains("\\\"") {
        return None;
    }
    let mut code = String::with_capacity(text.len());
    while let Some(start) = text.find(['/', '"']) {
        let (before, rest) = text.split_at(start);
        code.push_str(before);
        let end = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if let Some(comment) = rest.strip_prefix("/*") {
            comment.find("*/")? + 4
        } else if let Some(string) = rest.strip_prefix('"') {
            string.find('"')? + 2
        } else {
            1
        };
        code.push(' ');
        text = &rest[end..];
    }
    code.push_str(text);
    Some(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names<const N: usize>(names: [&str; N]) -> Option<HashSet<String>> {
        Some(names.map(str::to_owned).into())
    }

    #[test]
    fn in_text_the_kernels_with_the_call_print() {
        let text =
            b".version 8.0\n.extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 a);
            // .entry comment() { call vprintf; }
            .visible .entry quiet(.param .u64 p){ /* vprintf */ .loc 1 2; ret; }
            .file 1 \"vprintf.cu\"
            .visible .entry talks(.param .u64 p) {{ call.uni (r), vprintf, (f, a);}ret;}
            .entry after() { call vprintfs; ret;}";
        assert_eq!(of_text(text), names(["talks"]));
        assert_eq!(
            of_text(b".func f(){ call vprintf; } .entry k() { call f; }"),
            None
        );
        for broken in ["} .entry k() { vprintf; }", "/* .entry", ".file \"a\\\"b\""] {
            assert_eq!(of_text(broken.as_bytes()), None, "{broken}");
        }
    }

    /// Files of `tests/data/printing.cu`: linked, and relocatable, where a function is a caller too.
    #[test]
    fn in_machine_code_the_call_graph_names_the_kernels() {
        let linked = include_bytes!("../tests/data/printing.cubin");
        let kernels = names(["direct", "by_function", "by_address"]);
        assert_eq!(of_machine_code(linked), kernels);
        let bytes = "direct".len() + "by_function".len() + "by_address".len();
        assert_eq!(super::kernels(linked, bytes), kernels);
        assert_eq!(super::kernels(linked, bytes - 1), None);
        let relocatable = include_bytes!("../tests/data/printing_relocatable.cubin");
        assert_eq!(of_machine_code(relocatable), None);
        for length in 0..linked.len() {
            let _ = of_machine_code(&linked[..length]);
        }
    }
}
