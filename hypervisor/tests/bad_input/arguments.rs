//! Arguments for a parameter: a good one, and bad ones with a word for each.

use crate::fixture::{BYTES, Fixture, IMAGE};
use crate::specification::Parameter;

/// Room behind every pointer.
const ROOM: usize = 64 << 10;

/// Memory that arguments point to; one part for each parameter.
#[derive(Debug)]
pub struct Memory(Vec<Box<[u64]>>);

extern "C" fn callback() -> u64 {
    0
}

impl Memory {
    pub fn new() -> Self {
        let parts = (0..crate::library::ARGUMENTS).map(|_| vec![0; ROOM / 8].into_boxed_slice());
        Self(parts.collect())
    }

    /// The address of a parameter's part, filled with good values of its kind.
    fn filled(&mut self, index: usize, parameter: &Parameter, fixture: Option<&Fixture>) -> u64 {
        let live = |kind: &str| fixture.and_then(|fixture| fixture.live(kind));
        let elsewhere = self.0[crate::library::ARGUMENTS - 1].as_ptr();
        let part = &mut self.0[index];
        part.fill(0);
        let kind = parameter.kind.as_str();
        if !parameter.is_read {
        } else if kind == "string" {
            part[0] = u64::from_le_bytes(*b"kernel\0\0");
        } else if kind == "CUlaunchConfig" {
            // Grid and block of one.
            part[..3].fill(1 << 32 | 1);
        } else if kind == "CUDA_LAUNCH_PARAMS" {
            part[0] = live("CUfunction").unwrap_or(0);
            part[1..4].fill(1 << 32 | 1);
            part[5] = live("CUstream").unwrap_or(0);
        } else if kind == "void*" {
            part[..8].fill(elsewhere.expose_provenance() as u64);
        } else if kind == "usize" || kind == "u64" {
            part[..8].fill(64);
        } else if kind == "u32" || kind == "i32" {
            part[..8].fill(1 << 32 | 1);
        } else if let Some(value) = live(kind) {
            part[..8].fill(value);
        }
        part.as_ptr().expose_provenance() as u64
    }

    /// A good argument.
    pub fn good(&mut self, index: usize, parameter: &Parameter, fixture: Option<&Fixture>) -> u64 {
        match parameter.name.as_str() {
            // Beside `kernelParams` it is a contradiction.
            "extra" => return 0,
            "image" | "code" | "fatCubin" => return IMAGE.as_ptr().expose_provenance() as u64,
            _ if parameter.is_pointer => return self.filled(index, parameter, fixture),
            _ => {}
        }
        let kind = parameter.kind.as_str();
        if let Some(value) = fixture.and_then(|fixture| fixture.live(kind)) {
            return value;
        }
        let name = parameter.name.to_ascii_lowercase();
        match kind {
            "u8" | "u16" | "u32" | "i32" | "usize" | "u64" => {
                let none = [
                    "flags", "shared", "priority", "options", "ordinal", "version",
                ];
                u64::from(!none.iter().any(|word| name.contains(word)))
            }
            _ if kind.contains("Fn") || kind.contains("allback") => {
                callback as *const () as usize as u64
            }
            _ => 0,
        }
    }
}

/// Bad arguments for a parameter.
pub fn bad(parameter: &Parameter, fixture: &Fixture) -> Vec<(&'static str, u64)> {
    if parameter.is_pointer {
        return vec![("null", 0)];
    }
    let kind = parameter.kind.as_str();
    let mut bad = Vec::new();
    match kind {
        "CUdevice" => {
            let none = i64::from(-1).cast_unsigned();
            bad.extend([
                ("minus-one", none),
                ("beyond", 99),
                ("greatest", 0x7FFF_FFFF),
            ]);
        }
        "CUdeviceptr" => {
            let live = fixture.live(kind).unwrap_or(0);
            bad.extend([
                ("null", 0),
                ("end", live + BYTES),
                ("last", live + BYTES - 1),
            ]);
            bad.extend(fixture.gone(kind).map(|gone| ("freed", gone)));
            bad.extend(fixture.live("host").map(|host| ("host", host)));
        }
        "u8" | "u16" | "CUoccupancyB2DSize" => {}
        "u32" | "i32" | "usize" | "u64" => {
            bad.push(("zero", 0));
            if !parameter.is_length {
                let all = if matches!(kind, "u32" | "i32") {
                    u64::from(u32::MAX)
                } else {
                    u64::MAX
                };
                bad.push(("greatest", all));
            }
        }
        _ => {
            bad.push(("null", 0));
            if let Some(live) = fixture.live(kind) {
                let other = if kind == "CUstream" {
                    "CUevent"
                } else {
                    "CUstream"
                };
                bad.push(("off-by-one", live + 1));
                bad.extend(fixture.gone(kind).map(|gone| ("freed", gone)));
                bad.extend(fixture.live(other).map(|other| ("other", other)));
            } else {
                bad.push(("greatest", u64::from(u32::MAX)));
            }
        }
    }
    bad
}
