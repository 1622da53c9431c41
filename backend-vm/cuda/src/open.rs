//! Opening of a device: the driver, its checks, the context, the description.

use std::ffi::c_char;
use std::ptr;

use wormhole_api::constants::device_attribute::{
    IPC_EVENT_SUPPORTED, MEMPOOL_SUPPORTED_HANDLE_TYPES, PAGEABLE_MEMORY_ACCESS,
};
use wormhole_api::constants::memory_handle_type::POSIX_FILE_DESCRIPTOR;
use wormhole_api::constants::stream_flags;
use wormhole_api::ctypes::{CUcontext, CUstream, CUuuid};
use wormhole_device::{CuError, Description, Result};

use crate::driver::{Driver, DriverError};

/// Upper bound of the attributes of any known driver, exclusive.
const ATTRIBUTES_END: i32 = 256;

/// Options for opening a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Ordinal of the device on the host.
    pub ordinal: u32,
    /// Accepts a device whose kernels can access all memory of the worker's process.
    pub allow_pageable_access: bool,
}

/// Reason why the device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("{call} failed: {error}")]
    Call { call: &'static str, error: CuError },
    #[error(
        "device {ordinal} ({name}) gives kernels access to pageable memory, hence to all memory of the \
         process that drives it; turn heterogeneous memory management off with the module option \
         `options nvidia-uvm uvm_disable_hmm=1`, or allow it explicitly"
    )]
    PageableAccess { ordinal: u32, name: String },
}

/// Results of opening a device.
pub struct Opened {
    pub driver: Driver,
    pub device: i32,
    pub handles: Handles,
    pub description: Description,
}

/// Driver's handles that belong to a context.
#[derive(Clone, Copy, Debug)]
pub struct Handles {
    pub context: CUcontext,
    /// Stream without work, for queries of the context's health.
    pub sentinel: CUstream,
}

// SAFETY: the driver's handles may be used by any thread.
unsafe impl Send for Handles {}

/// Initialises the driver and the device's primary context, which becomes current in the calling thread.
pub fn open(options: &Options) -> std::result::Result<Opened, OpenError> {
    let driver = Driver::load()?;
    let failed = |call| move |error| OpenError::Call { call, error };
    // SAFETY: the first call of the driver.
    unsafe { driver.cuInit(0) }.map_err(failed("cuInit"))?;
    let mut device = 0;
    let ordinal = i32::try_from(options.ordinal).unwrap_or(i32::MAX);
    // SAFETY: the pointer is good for one i32.
    unsafe { driver.cuDeviceGet(&raw mut device, ordinal) }.map_err(failed("cuDeviceGet"))?;
    let name = device_name(&driver, device).map_err(failed("cuDeviceGetName"))?;
    let attributes = device_attributes(&driver, device);
    if attributes.contains(&(PAGEABLE_MEMORY_ACCESS, 1)) && !options.allow_pageable_access {
        return Err(OpenError::PageableAccess {
            ordinal: options.ordinal,
            name,
        });
    }
    let handles = retain(&driver, device).map_err(failed("cuDevicePrimaryCtxRetain"))?;
    let description =
        describe(&driver, device, name, attributes).map_err(failed("describing the device"))?;
    Ok(Opened {
        driver,
        device,
        handles,
        description,
    })
}

/// Retains the device's primary context and makes it current in the calling thread.
pub fn retain(driver: &Driver, device: i32) -> Result<Handles> {
    let mut context = ptr::null_mut();
    let mut sentinel = ptr::null_mut();
    // SAFETY: the device exists, the pointers are good; the context is current for the stream's creation.
    unsafe {
        driver.cuDevicePrimaryCtxRetain(&raw mut context, device)?;
        driver.cuCtxSetCurrent(context)?;
        driver.cuStreamCreateWithPriority(&raw mut sentinel, stream_flags::NON_BLOCKING, 0)?;
    }
    Ok(Handles { context, sentinel })
}

fn device_name(driver: &Driver, device: i32) -> Result<String> {
    let mut name = [0_u8; 256];
    // SAFETY: the buffer has the length that the call passes.
    unsafe { driver.cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 256, device) }?;
    let end = name
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

/// Returns whether `cuIpc*` handles work in a process with this id. The driver compares process ids: in a PID namespace
/// of its own every worker has the id 1, and the driver would take another worker's handle for its own process's.
fn has_a_number(process: u32) -> bool {
    process != 1
}

fn device_attributes(driver: &Driver, device: i32) -> Vec<(i32, i32)> {
    (1..ATTRIBUTES_END)
        .filter_map(|id| {
            let mut value = 0;
            // SAFETY: the pointer is good for one i32; an unknown attribute is an error.
            let known = unsafe { driver.cuDeviceGetAttribute(&raw mut value, id, device) };
            // Pools can be shared by descriptors only.
            let value = match id {
                MEMPOOL_SUPPORTED_HANDLE_TYPES => value & POSIX_FILE_DESCRIPTOR.cast_signed(),
                IPC_EVENT_SUPPORTED if !has_a_number(std::process::id()) => 0,
                _ => value,
            };
            known.ok().map(|()| (id, value))
        })
        .collect()
}

/// Describes the device. The context must be current.
fn describe(
    driver: &Driver,
    device: i32,
    name: String,
    attributes: Vec<(i32, i32)>,
) -> Result<Description> {
    let mut uuid = CUuuid { bytes: [0; 16] };
    let mut total = 0;
    let mut driver_version = 0;
    let mut stream_priorities = (0, 0);
    // SAFETY: the device exists and all pointers are good for the results.
    unsafe {
        driver.cuDeviceGetUuid_v2(&raw mut uuid, device)?;
        driver.cuDeviceTotalMem_v2(&raw mut total, device)?;
        driver.cuDriverGetVersion(&raw mut driver_version)?;
        driver.cuCtxGetStreamPriorityRange(
            &raw mut stream_priorities.0,
            &raw mut stream_priorities.1,
        )?;
    }
    Ok(Description {
        name,
        uuid: uuid.bytes.map(|byte| u8::from_ne_bytes(byte.to_ne_bytes())),
        total_memory: total as u64,
        driver_version,
        attributes,
        stream_priorities,
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::process::{Command, Stdio};

    use super::*;

    /// Set in the process that the test starts.
    const STARTED: &str = "WORMHOLE_TEST_STARTED";

    /// Runs itself as a process of this PID namespace, and as the first one of another.
    #[test]
    fn a_worker_in_a_namespace_of_its_own_has_no_handles_of_memory() {
        const NAME: &str =
            "open::tests::a_worker_in_a_namespace_of_its_own_has_no_handles_of_memory";
        if std::env::var_os(STARTED).is_some() {
            println!("handles: {}", has_a_number(std::process::id()));
            return;
        }
        let own = std::env::current_exe().expect("its path");
        let says = |words: &[&OsStr]| {
            let mut command = Command::new(words[0]);
            command
                .args(&words[1..])
                .args(["--exact", NAME, "--nocapture"]);
            let output = command.env(STARTED, "").stdin(Stdio::null()).output();
            String::from_utf8_lossy(&output.expect("it starts").stdout).into_owned()
        };
        let one = says(&[own.as_os_str()]);
        assert!(one.contains("handles: true"), "{one}");
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root makes PID namespaces");
            return;
        }
        let [unshare, pid, fork] = ["unshare", "--pid", "--fork"].map(OsStr::new);
        let first = says(&[unshare, pid, fork, own.as_os_str()]);
        assert!(first.contains("handles: false"), "{first}");
    }
}
