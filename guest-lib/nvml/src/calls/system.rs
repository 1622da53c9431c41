//! Implements initialization, error strings, versions and queries of the system.

use std::ffi::{CStr, c_char};

use nvml_wrapper_sys::bindings::*;
use wormhole_ring::control::facts;

use super::{characters, put, put_text, version};
use crate::error::{NvmlError, Result};
use crate::library::{Age, library};

/// Driver version that this library reports if the host has no driver.
const DRIVER: &str = "580.00";
/// Major version of NVML, which precedes the driver version.
const NVML: &str = "13";

pub unsafe fn nvmlInitWithFlags(_flags: u32) -> Result {
    library().initialize()
}

pub unsafe fn nvmlInit_v2() -> Result {
    library().initialize()
}

pub unsafe fn nvmlShutdown() -> Result {
    library().shut_down()
}

pub unsafe fn nvmlErrorString(result: nvmlReturn_t) -> *const c_char {
    let text: &CStr = match result {
        0 => c"The operation was successful",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        14 => c"Corrupted infoROM",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        17 => c"GPU access blocked by the operating system",
        18 => c"Driver/library version mismatch",
        19 => c"In use by another client",
        20 => c"Insufficient Memory",
        21 => c"No data",
        22 => c"The requested vGPU operation is not available on target device, because ECC is enabled",
        23 => c"Insufficient Resources",
        24 => c"Frequency Not Supported",
        25 => c"Argument version mismatch",
        26 => c"Requested functionality has been deprecated",
        27 => c"System is not ready",
        28 => c"GPU not found",
        29 => c"Invalid state",
        30 => c"Reset type not supported",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

pub unsafe fn nvmlSystemGetDriverVersion(place: *mut c_char, length: u32) -> Result {
    let view = library().view(0, Age::Any)?;
    let own = view.text(facts::DRIVER_VERSION);
    // SAFETY: the caller upholds the contract.
    unsafe { put_text(place, length, own.unwrap_or(DRIVER)) }
}

/// Returns the version, also before initialization, like the native library.
pub unsafe fn nvmlSystemGetNVMLVersion(place: *mut c_char, length: u32) -> Result {
    // SAFETY: the caller upholds the contract.
    unsafe { put_text(place, length, &format!("{NVML}.{DRIVER}")) }
}

pub unsafe fn nvmlSystemGetCudaDriverVersion(place: *mut i32) -> Result {
    let view = library().view(0, Age::Any)?;
    let number = view.number(facts::CUDA_VERSION);
    let number = number.and_then(|number| i32::try_from(number).ok());
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, number.ok_or(NvmlError::FUNCTION_NOT_FOUND)?) }
}

pub unsafe fn nvmlSystemGetCudaDriverVersion_v2(place: *mut i32) -> Result {
    // SAFETY: the caller upholds the contract.
    unsafe { nvmlSystemGetCudaDriverVersion(place) }
}

pub unsafe fn nvmlSystemGetDriverBranch(
    place: *mut nvmlSystemDriverBranchInfo_t,
    length: u32,
) -> Result {
    let view = library().view(0, Age::Any)?;
    let own = view.text(facts::DRIVER_VERSION).unwrap_or(DRIVER);
    let branch = own.split('.').next().unwrap_or(own);
    let branch = format!("r{branch}_00");
    // SAFETY: null, or a valid structure of the caller.
    let Some(info) = (unsafe { place.as_mut() }) else {
        return Err(NvmlError::INVALID_ARGUMENT);
    };
    if info.version != version::<nvmlSystemDriverBranchInfo_t>(1) {
        return Err(NvmlError::VERSION_MISMATCH);
    }
    if branch.len() >= length as usize {
        return Err(NvmlError::INSUFFICIENT_SIZE);
    }
    info.branch = characters(&branch);
    Ok(())
}

/// Reads the name of a process of this guest from `/proc`.
pub unsafe fn nvmlSystemGetProcessName(pid: u32, place: *mut c_char, length: u32) -> Result {
    library().check()?;
    if length == 0 {
        return Err(NvmlError::INVALID_ARGUMENT);
    }
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| NvmlError::NOT_FOUND)?;
    let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
    let name = String::from_utf8_lossy(first);
    // Truncates a name that does not fit.
    let room = name.floor_char_boundary(length as usize - 1);
    // SAFETY: the caller upholds the contract.
    unsafe { put_text(place, length, &name[..room]) }
}

/// Returns 0: there are no S-class units.
pub unsafe fn nvmlUnitGetCount(place: *mut u32) -> Result {
    library().check()?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, 0) }
}

/// Returns 0: there are no host interface cards.
pub unsafe fn nvmlSystemGetHicVersion(count: *mut u32, _entries: *mut nvmlHwbcEntry_t) -> Result {
    library().check()?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(count, 0) }
}

pub unsafe fn nvmlGetExcludedDeviceCount(place: *mut u32) -> Result {
    library().check()?;
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, 0) }
}

/// Reports that confidential computing is off in the guest, regardless of the host.
pub unsafe fn nvmlSystemGetConfComputeSettings(
    place: *mut nvmlSystemConfComputeSettings_t,
) -> Result {
    library().check()?;
    // SAFETY: null, or a valid structure of the caller.
    let Some(settings) = (unsafe { place.as_mut() }) else {
        return Err(NvmlError::INVALID_ARGUMENT);
    };
    if settings.version != version::<nvmlSystemConfComputeSettings_t>(1) {
        return Err(NvmlError::VERSION_MISMATCH);
    }
    *settings = nvmlSystemConfComputeSettings_t {
        version: settings.version,
        environment: 0,
        ccFeature: 0,
        devToolsMode: 0,
        multiGpuMode: 0,
    };
    Ok(())
}

pub unsafe fn nvmlSystemGetConfComputeState(place: *mut nvmlConfComputeSystemState_t) -> Result {
    library().check()?;
    let state = nvmlConfComputeSystemState_t {
        environment: 0,
        ccFeature: 0,
        devToolsMode: 0,
    };
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, state) }
}

pub unsafe fn nvmlSystemGetConfComputeCapabilities(
    place: *mut nvmlConfComputeSystemCaps_t,
) -> Result {
    library().check()?;
    let none = nvmlConfComputeSystemCaps_t {
        cpuCaps: 0,
        gpusCaps: 0,
    };
    // SAFETY: the caller upholds the contract.
    unsafe { put(place, none) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_words_of_its_own() {
        let text = |code| {
            // SAFETY: the function returns a static string.
            unsafe { CStr::from_ptr(nvmlErrorString(code)) }
                .to_str()
                .unwrap()
        };
        let known: std::collections::BTreeSet<&str> = (0..31).map(text).collect();
        assert_eq!(known.len(), 31);
        assert!(!known.contains(text(999)));
        assert_eq!(text(12345), text(999));
    }

    #[test]
    fn before_initialization_the_library_tells_its_own_version_alone() {
        let mut buffer = [0x55; 32];
        // SAFETY: the buffer has at least as many bytes as each call passes.
        unsafe {
            nvmlSystemGetNVMLVersion(buffer.as_mut_ptr(), 32).unwrap();
            let short = nvmlSystemGetNVMLVersion(buffer.as_mut_ptr(), 9);
            assert_eq!(short, Err(NvmlError::INSUFFICIENT_SIZE));
            let nothing = nvmlSystemGetDriverVersion(buffer.as_mut_ptr(), 32);
            assert_eq!(nothing, Err(NvmlError::UNINITIALIZED));
            assert_eq!(nvmlShutdown(), Err(NvmlError::UNINITIALIZED));
        }
        assert_eq!(
            buffer[..10]
                .iter()
                .map(|c| c.cast_unsigned())
                .collect::<Vec<_>>(),
            b"13.580.00\0"
        );
    }
}
