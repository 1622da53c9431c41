//! Checks that no crate declares a constant of CUDA that the table of the driver API declares, as a part of
//! `cargo xtask structure`.

use std::path::Path;

use super::{TABLES, sources};
use crate::command::Failure;

/// Constants whose names and values equal those of CUDA by chance: file, name, and what they mean. One that the check
/// would not find is an error, so that none outlives its constant.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    (
        "backend-vm/cpu/src/pools.rs",
        "DEFAULT",
        "number of the default pool",
    ),
    (
        "backend-vm/cuda/src/shared_events.rs",
        "SHARED",
        "bit in a word that processes share",
    ),
];

/// A constant of the table: its name there and its value.
type Declared = (String, i64);

/// Prints what was compared, and returns whether no crate in `folders` declares a constant of the table.
pub fn constants(root: &Path, folders: &[&Path]) -> Result<bool, Failure> {
    let table = wormhole_idl::load(&root.join(TABLES))
        .map_err(|error| Failure::new(format!("the driver API's table: {error}")))?;
    let declared = declared(&table);
    if declared.is_empty() {
        return Err(Failure::new("the driver API's table declares no constants"));
    }
    let mut unused: Vec<_> = EXCEPTIONS.iter().collect();
    let (mut files, mut holds) = (0, true);
    for folder in folders {
        for part in ["src", "tests", "benches", "examples"] {
            let folder = folder.join(part);
            if !folder.is_dir() {
                continue;
            }
            for (path, text) in sources(&folder)? {
                files += 1;
                let file = path.strip_prefix(root).unwrap_or(&path);
                for (line, name, reason) in repeated(&text, &declared) {
                    let count = unused.len();
                    unused.retain(|one| !(file == Path::new(one.0) && name == one.1));
                    if unused.len() == count {
                        println!(
                            "BROKEN: {}:{line} declares {name}, but {reason}: use wormhole_api::constants",
                            file.display()
                        );
                        holds = false;
                    }
                }
            }
        }
    }
    for (file, name, _) in unused {
        println!(
            "BROKEN: {file} has no {name} that equals a constant of CUDA: remove the exception"
        );
        holds = false;
    }
    println!(
        "{files} files were compared with the {} constants of the driver API's table",
        declared.len()
    );
    Ok(holds)
}

/// Returns all constants of the table: flags and enumerations, attributes of devices, results.
fn declared(table: &wormhole_idl::Table) -> Vec<Declared> {
    let sets = table.constants.iter().flat_map(|set| &set.values);
    let sets = sets.map(|one| (one.name.clone(), one.value));
    let attributes = table.attributes.iter();
    let attributes = attributes.map(|one| (one.name.clone(), i64::from(one.id)));
    let results = table.results.iter();
    let results = results.map(|one| (one.name.clone(), i64::from(one.code)));
    sets.chain(attributes).chain(results).collect()
}

/// Finds constants that a source declares by a number although the table does: line, name and reason. The table has the
/// same value under a name that begins or ends with the constant's or the reverse, or the comment above the constant
/// gives CUDA's name for it.
fn repeated(text: &str, declared: &[Declared]) -> Vec<(usize, String, String)> {
    let (mut found, mut named) = (Vec::new(), None);
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(comment) = line.strip_prefix("//") {
            named = named.or_else(|| cuda_name(comment));
            continue;
        }
        let in_cuda = named.take();
        let Some((name, value)) = constant(line) else {
            continue;
        };
        let same = |one: &&Declared| one.1 == value && similar(&one.0, name);
        let reason = match (in_cuda, declared.iter().find(same)) {
            (Some(c_name), _) => format!("its comment says that it is {c_name}"),
            (None, Some((other, _))) => format!("the table declares {other} with this value"),
            (None, None) => continue,
        };
        found.push((index + 1, name.to_owned(), reason));
    }
    found
}

/// Returns the first name of a constant of `cuda.h` in a comment.
fn cuda_name(comment: &str) -> Option<String> {
    let mut words = comment.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    let is_name = |word: &&str| {
        (word.starts_with("CU_") || word.starts_with("CUDA_"))
            && word.chars().all(|c| !c.is_ascii_lowercase())
    };
    words.find(is_name).map(str::to_owned)
}

/// Reads a declaration of a constant by one number, or by `Self` of one. The type is one that CUDA has for flags and
/// enumerations; sizes and counts (`usize`) are none.
fn constant(line: &str) -> Option<(&str, i64)> {
    let (visibility, rest) = line.split_once("const ")?;
    if !(visibility.is_empty() || visibility.starts_with("pub")) {
        return None;
    }
    let (name, rest) = rest.split_once(": ")?;
    let (kind, value) = rest.strip_suffix(';')?.split_once(" = ")?;
    let of_cuda = matches!(
        kind,
        "Self" | "u8" | "u32" | "i32" | "u64" | "c_int" | "c_uint"
    );
    if !(of_cuda || kind.starts_with("CU")) {
        return None;
    }
    let inner = value.strip_prefix("Self(");
    let value = inner
        .and_then(|rest| rest.strip_suffix(')'))
        .unwrap_or(value);
    let digits = value.replace('_', "");
    let value = match (digits.strip_prefix("0x"), digits.strip_prefix("1 << ")) {
        (Some(hexadecimal), _) => i64::from_str_radix(hexadecimal, 16).ok()?,
        (None, Some(bit)) => 1_i64.checked_shl(bit.parse().ok()?)?,
        (None, None) => digits.parse().ok()?,
    };
    Some((name, value))
}

/// Returns whether one name begins or ends with all words of the other.
fn similar(one: &str, other: &str) -> bool {
    let (long, short) = if one.len() >= other.len() {
        (one, other)
    } else {
        (other, one)
    };
    long == short
        || long
            .strip_suffix(short)
            .is_some_and(|rest| rest.ends_with('_'))
        || long
            .strip_prefix(short)
            .is_some_and(|rest| rest.starts_with('_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<String> {
        let declared = [
            ("POSIX_FILE_DESCRIPTOR".to_owned(), 1),
            ("DEVICE".to_owned(), 1),
            ("LIGHTWEIGHT_FLAGS".to_owned(), 47),
            ("INFO_LOG_BUFFER".to_owned(), 3),
            ("INVALID".to_owned(), -2),
        ];
        let found = repeated(text, &declared);
        found.into_iter().map(|(_, name, _)| name).collect()
    }

    #[test]
    fn a_constant_of_the_table_is_found_under_a_similar_name() {
        for line in [
            "const POSIX_FILE_DESCRIPTOR: u32 = 1;",
            "    const FILE_DESCRIPTOR: i32 = 1;",
            "pub(crate) const LOCATION_DEVICE: u32 = 0x1;",
            "pub const LIGHTWEIGHT_FLAGS: u64 = 0x2F;",
            "const INFO_LOG: CUjit_option = 3;",
            "const DEVICE_INVALID: i32 = -2;",
            "const DEVICE: u32 = 1 << 0;",
            "pub const DEVICE: Self = Self(1);",
        ] {
            assert_eq!(found(line).len(), 1, "{line}");
        }
        for line in [
            "const FILE_DESCRIPTOR: u32 = 2;",
            "const DEVICES: u32 = 1;",
            "const DEVICE: usize = 1;",
            "const DEVICE: u32 = memory_location::DEVICE;",
            "pub const DEVICE: Self = Self(memory_location::DEVICE);",
            "fn device<const DEVICE: u32>() {}",
        ] {
            assert!(found(line).is_empty(), "{line}");
        }
    }

    #[test]
    fn a_constant_is_found_whose_comment_gives_the_name_of_cuda() {
        let text = "/// `CU_STREAM_LEGACY`.\nconst FIRST: u64 = 1;\nconst SECOND: u64 = 2;\n";
        assert_eq!(found(text), ["FIRST"]);
        assert!(found("/// A `CUstream`, or CUDA's.\nconst FIRST: u64 = 1;").is_empty());
    }
}
