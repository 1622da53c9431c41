//! Finds kernel modules and their dependencies, and orders them for loading.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use lzma_rust2::XzReader;
use object::Endianness;
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, SectionHeader};

use crate::error::{ImageError, io};

/// Modules of one kernel, by name.
#[derive(Debug)]
pub struct Modules {
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

/// A module, uncompressed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Module {
    pub name: String,
    pub data: Vec<u8>,
}

impl Modules {
    /// Indexes the modules below `lib/modules/RELEASE`.
    pub fn in_folder(folder: &Path) -> Result<Self, ImageError> {
        let mut files = BTreeMap::new();
        let mut folders = vec![folder.join("kernel")];
        while let Some(current) = folders.pop() {
            for entry in fs::read_dir(&current).map_err(io("list", &current))? {
                let path = entry.map_err(io("list", &current))?.path();
                if path.is_dir() {
                    folders.push(path);
                } else if let Some(name) = path.file_name().and_then(module_name) {
                    files.insert(name, path);
                }
            }
        }
        let list = folder.join("modules.builtin");
        let builtin = fs::read_to_string(&list).map_err(io("read", &list))?;
        let builtin = builtin
            .lines()
            .filter_map(|line| Path::new(line).file_name().and_then(module_name))
            .collect();
        Ok(Self { files, builtin })
    }

    /// Adds a module that the kernel does not have.
    pub fn add(&mut self, name: &str, path: PathBuf) {
        self.files.insert(canonical(name), path);
    }

    /// Returns the wanted modules and their dependencies, each after its dependencies, without built-in
    /// modules.
    pub fn in_order(&self, wanted: &[&str]) -> Result<Vec<Module>, ImageError> {
        let mut order = Vec::new();
        for name in wanted {
            visit(&canonical(name), &mut order, &mut Vec::new(), &mut |name| {
                self.load(name)
            })?;
        }
        Ok(order.into_iter().map(|(module, _)| module).collect())
    }

    /// Reads a module and the names of its dependencies; `None` if it is built in.
    fn load(&self, name: &str) -> Result<Option<(Module, Vec<String>)>, ImageError> {
        let Some(path) = self.files.get(name) else {
            if self.builtin.contains(name) {
                return Ok(None);
            }
            return Err(ImageError::NoModule {
                name: name.to_owned(),
            });
        };
        let data = read(path)?;
        let depends =
            dependencies(&data).ok_or_else(|| ImageError::NotAModule { path: path.clone() })?;
        Ok(Some((
            Module {
                name: name.to_owned(),
                data,
            },
            depends,
        )))
    }
}

type Loaded = (Module, Vec<String>);

/// Appends a module after its dependencies, depth first.
fn visit(
    name: &str,
    order: &mut Vec<Loaded>,
    above: &mut Vec<String>,
    load: &mut impl FnMut(&str) -> Result<Option<Loaded>, ImageError>,
) -> Result<(), ImageError> {
    if order.iter().any(|(module, _)| module.name == name) {
        return Ok(());
    }
    if above.iter().any(|other| other == name) {
        return Err(ImageError::ModuleCycle {
            name: name.to_owned(),
        });
    }
    let Some(loaded) = load(name)? else {
        return Ok(());
    };
    above.push(name.to_owned());
    for dependency in &loaded.1 {
        visit(dependency, order, above, load)?;
    }
    above.pop();
    order.push(loaded);
    Ok(())
}

/// Returns the module name of a file, `kvm_amd` for `kvm-amd.ko.xz`; `None` if it is not a module.
fn module_name(file: &OsStr) -> Option<String> {
    let name = file.to_str()?;
    let stem = name
        .strip_suffix(".xz")
        .unwrap_or(name)
        .strip_suffix(".ko")?;
    Some(canonical(stem))
}

/// Replaces `-` by `_`, which the kernel treats as equal in module names.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

/// Reads a module's file and decompresses it.
fn read(path: &Path) -> Result<Vec<u8>, ImageError> {
    let packed = fs::read(path).map_err(io("read", path))?;
    if path.extension() != Some(OsStr::new("xz")) {
        return Ok(packed);
    }
    let mut data = Vec::new();
    let mut unpacked = XzReader::new(packed.as_slice(), true);
    unpacked
        .read_to_end(&mut data)
        .map_err(|source| ImageError::Xz {
            path: path.to_owned(),
            source,
        })?;
    Ok(data)
}

/// Returns the names in the `depends=` entry of a module's `.modinfo` section.
fn dependencies(data: &[u8]) -> Option<Vec<String>> {
    let header = FileHeader64::<Endianness>::parse(data).ok()?;
    let endian = header.endian().ok()?;
    let sections = header.sections(endian, data).ok()?;
    let (_, section) = sections.section_by_name(endian, b".modinfo")?;
    let info = section.data(endian, data).ok()?;
    let names = info
        .split(|&byte| byte == 0)
        .find_map(|entry| entry.strip_prefix(b"depends="))?;
    let names = std::str::from_utf8(names).ok()?;
    Some(
        names
            .split(',')
            .filter(|name| !name.is_empty())
            .map(canonical)
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Resolves modules of an invented set of names and dependencies. The dependency `!` means built in.
    fn resolve(set: &[(&str, &[&str])], wanted: &[&str]) -> Result<Vec<String>, ImageError> {
        let mut order = Vec::new();
        for name in wanted {
            visit(name, &mut order, &mut Vec::new(), &mut |name| {
                let (_, depends) =
                    set.iter()
                        .find(|(known, _)| *known == name)
                        .ok_or_else(|| ImageError::NoModule {
                            name: name.to_owned(),
                        })?;
                if *depends == ["!"] {
                    return Ok(None);
                }
                let depends = depends.iter().map(|&name| name.to_owned()).collect();
                Ok(Some((
                    Module {
                        name: name.to_owned(),
                        data: Vec::new(),
                    },
                    depends,
                )))
            })?;
        }
        Ok(order.into_iter().map(|(module, _)| module.name).collect())
    }

    #[test]
    fn dependencies_come_first_and_each_module_once() {
        let set: [(&str, &[&str]); 5] = [
            ("transport", &["common", "vsock", "virtio"]),
            ("common", &["vsock"]),
            ("vsock", &[]),
            ("virtio", &["!"]),
            ("console", &["virtio"]),
        ];
        assert_eq!(
            resolve(&set, &["transport", "vsock", "console"]).expect("all are there"),
            ["vsock", "common", "transport", "console"]
        );
    }

    #[test]
    fn a_missing_module_is_named() {
        let error = resolve(&[("kvm_amd", &["kvm"])], &["kvm_amd"]).expect_err("kvm is missing");
        assert!(error.to_string().contains("kvm"), "{error}");
        assert!(matches!(error, ImageError::NoModule { name } if name == "kvm"));
    }

    #[test]
    fn a_cycle_is_an_error() {
        let error = resolve(&[("a", &["b"]), ("b", &["a"])], &["a"]).expect_err("a needs itself");
        assert!(matches!(error, ImageError::ModuleCycle { .. }));
    }

    #[test]
    fn file_names_become_module_names() {
        assert_eq!(
            module_name("kvm-amd.ko.xz".as_ref()).as_deref(),
            Some("kvm_amd")
        );
        assert_eq!(
            module_name("device_dax.ko".as_ref()).as_deref(),
            Some("device_dax")
        );
        assert_eq!(module_name("modules.builtin".as_ref()), None);
    }

    #[test]
    fn what_is_no_module_has_no_dependencies() {
        assert_eq!(dependencies(b""), None);
        assert_eq!(dependencies(b"\x7fELF and nothing else"), None);
        let own = fs::read(std::env::current_exe().expect("the test has a file"))
            .expect("it can be read");
        assert_eq!(dependencies(&own), None);
    }
}
