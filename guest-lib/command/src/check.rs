//! Checks, in the order in which a CUDA program depends on them: kernel, window, permission, control channel, page faults,
//! libraries, backend, devices.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use wormhole_connect::{AGENT, Observer, ObserverError, VSOCK, WINDOW};
use wormhole_init::PARTS;
use wormhole_init::window::DaxDevice;
use wormhole_ring::control::facts;
use wormhole_serial::PORT;

/// Oldest kernel whose DAX drivers the window is known to work with.
const OLDEST_KERNEL: (u32, u32) = (5, 15);

/// Device by which a process serves its own page faults (Linux 6.1).
const FAULTS: &str = "/dev/userfaultfd";

/// Numbers of `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR`.
const CAPABILITY: [&str; 2] = ["75", "76"];

/// Libraries that programs load.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

/// Result of one check.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    what: &'static str,
    found: Result<String, Fault>,
}

/// A fault and its remedy, a sentence each.
#[derive(Debug, PartialEq, Eq)]
pub struct Fault {
    fault: String,
    remedy: String,
}

impl Fault {
    fn new(fault: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            fault: fault.into(),
            remedy: remedy.into(),
        }
    }
}

/// Makes all checks.
pub fn all() -> Vec<Finding> {
    let mut findings: Vec<Finding> = [
        ("kernel", kernel as fn() -> Result<String, Fault>),
        ("window", window),
        ("access", access),
        ("control", control),
        ("faults", faults),
        ("libraries", libraries),
    ]
    .map(|(what, check)| Finding {
        what,
        found: check(),
    })
    .into();
    findings.extend(backend());
    findings
}

/// Prints the findings. Returns true if all are good.
pub fn report(findings: &[Finding]) -> bool {
    let faults = findings.iter().filter(|one| one.found.is_err()).count();
    let mut text: String = findings.iter().map(line).collect();
    text.push_str(&match faults {
        0 => "All is well: CUDA programs of this user can run.\n".to_owned(),
        1 => "1 check failed.\n".to_owned(),
        more => format!("{more} checks failed.\n"),
    });
    // The exit status says the same if standard output is closed.
    drop(io::stdout().write_all(text.as_bytes()));
    faults == 0
}

fn line(finding: &Finding) -> String {
    match &finding.found {
        Ok(found) => format!("ok    {:10} {found}\n", finding.what),
        Err(Fault { fault, remedy }) => {
            format!("FAIL  {:10} {fault}\n{:17}{remedy}\n", finding.what, "")
        }
    }
}

fn kernel() -> Result<String, Fault> {
    match fs::read_to_string("/proc/sys/kernel/osrelease") {
        Ok(release) => check_kernel(release.trim().to_owned()),
        Err(error) => Err(Fault::new(
            format!("its release cannot be read: {error}"),
            "Mount /proc.",
        )),
    }
}

fn check_kernel(release: String) -> Result<String, Fault> {
    let mut numbers = release
        .split(|letter: char| !letter.is_ascii_digit())
        .map_while(|digits| digits.parse::<u32>().ok());
    let version = (
        numbers.next().unwrap_or_default(),
        numbers.next().unwrap_or_default(),
    );
    if version >= OLDEST_KERNEL {
        return Ok(release);
    }
    let (major, minor) = OLDEST_KERNEL;
    Err(Fault::new(
        format!("{release} is older than {major}.{minor}"),
        "Boot a newer kernel.",
    ))
}

/// Returns the part of the window for registered memory.
fn pages() -> Option<DaxDevice> {
    DaxDevice::find().and_then(|window| window.pages()).ok()?
}

fn window() -> Result<String, Fault> {
    check_window(
        DaxDevice::find().ok(),
        pages(),
        Path::new("/sys/bus/dax/drivers/device_dax").exists(),
    )
}

fn check_window(
    device: Option<DaxDevice>,
    pages: Option<DaxDevice>,
    has_driver: bool,
) -> Result<String, Fault> {
    let Some(device) = device else {
        return Err(match has_driver {
            true => Fault::new(
                "this machine has none",
                "Boot the guest under Wormhole, which gives it a window.",
            ),
            false => Fault::new(
                "the kernel's DAX drivers are not loaded",
                "Run `modprobe -a dax_hmem device_dax` as root; Ubuntu has them in linux-modules-extra.",
            ),
        });
    };
    let name = &device.name;
    match device.driver.as_deref() {
        Some("device_dax") if device.bytes > 0 => Ok(match pages {
            None => format!("{name}, {} MiB", device.bytes >> 20),
            Some(pages) => format!(
                "{name}, {} MiB and {} MiB for registered memory",
                device.bytes >> 20,
                pages.bytes >> 20
            ),
        }),
        Some("kmem") => Err(Fault::new(
            format!("the kernel uses {name} as ordinary memory"),
            "Restart the guest; if that does not help, add `blacklist kmem` to a file in /etc/modprobe.d first.",
        )),
        _ => Err(Fault::new(
            format!("{name} is not bound to the driver device_dax"),
            "Run `systemctl restart wormhole-guest-window` as root; if that fails, its `systemctl status` says why.",
        )),
    }
}

fn access() -> Result<String, Fault> {
    let open = |path: &Path| OpenOptions::new().read(true).write(true).open(path);
    let found = check_access(WINDOW, open(WINDOW.as_ref()).map(drop))?;
    if let Some(pages) = pages() {
        let path = Path::new("/dev").join(pages.name);
        check_access(&path.display().to_string(), open(&path).map(drop))?;
    }
    Ok(found)
}

fn check_access(path: &str, opened: io::Result<()>) -> Result<String, Fault> {
    let error = match opened {
        Ok(()) => return Ok(format!("this user may use {path}")),
        Err(error) => error,
    };
    Err(match error.kind() {
        io::ErrorKind::PermissionDenied => Fault::new(
            format!("this user may not use {path}"),
            "Run `usermod -aG wormhole USER` as root with this user's name, then log in again.",
        ),
        io::ErrorKind::NotFound => Fault::new(
            format!("{path} is missing"),
            "If the window above is good, run `udevadm trigger --action=add --subsystem-match=dax` as root.",
        ),
        _ => Fault::new(
            format!("{path} cannot be opened: {error}"),
            "Mend the window first.",
        ),
    })
}

/// Tells whether managed memory can go to the device. It stays on the host otherwise, which is no fault.
fn faults() -> Result<String, Fault> {
    let opened = OpenOptions::new().read(true).write(true).open(FAULTS);
    let unprivileged = fs::read_to_string("/proc/sys/vm/unprivileged_userfaultfd");
    // Root may make the system call in any case.
    let is_root = fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0);
    let is_permitted = is_root || unprivileged.is_ok_and(|text| text.trim() == "1");
    Ok(check_faults(opened.is_ok() || is_permitted))
}

fn check_faults(is_permitted: bool) -> String {
    match is_permitted {
        true => "managed memory goes to the device".to_owned(),
        false => format!(
            "managed memory stays on the host: this user may not use {FAULTS}, nor is vm.unprivileged_userfaultfd 1"
        ),
    }
}

fn control() -> Result<String, Fault> {
    check_control(|path| Path::new(path).exists())
}

fn check_control(is: impl Fn(&str) -> bool) -> Result<String, Fault> {
    if is(AGENT) {
        return Ok(format!("{AGENT}, which leads to {PORT}"));
    }
    if is(PORT) {
        return Err(Fault::new(
            format!("the agent of {PORT} does not run"),
            "Run `systemctl restart wormhole-guest-control` as root; if that fails, its `systemctl status` says why.",
        ));
    }
    match is(VSOCK) {
        true => Ok(VSOCK.to_owned()),
        false => Err(Fault::new(
            format!("{VSOCK} is missing"),
            "Run `modprobe vmw_vsock_virtio_transport` as root.",
        )),
    }
}

fn libraries() -> Result<String, Fault> {
    let output = Command::new("/sbin/ldconfig").arg("-p").output();
    let cache = output.map_err(|error| {
        Fault::new(
            format!("/sbin/ldconfig does not start: {error}"),
            "Install Debian's package libc-bin.",
        )
    })?;
    check_libraries(&String::from_utf8_lossy(&cache.stdout))
}

/// Checks that the loader finds our libraries first, in a cache as `ldconfig -p` prints it.
fn check_libraries(cache: &str) -> Result<String, Fault> {
    for name in LIBRARIES {
        let mut lines = cache.lines().map(str::trim);
        let first = lines.find(|line| {
            line.strip_prefix(name)
                .is_some_and(|at| at.starts_with(' '))
        });
        let path = first
            .and_then(|line| line.split_once("=> "))
            .map(|(_, path)| path);
        match path {
            Some(path) if Path::new(path).starts_with(PARTS) => {}
            Some(path) => {
                return Err(Fault::new(
                    format!("programs load {path} instead of {PARTS}/{name}"),
                    "Remove the NVIDIA driver of this guest, which has no GPU of its own.",
                ));
            }
            None => {
                return Err(Fault::new(
                    format!("the loader does not find {name}"),
                    "Run `ldconfig` as root; if that does not help, install the package wormhole-guest again.",
                ));
            }
        }
    }
    Ok(format!("{} in {PARTS}", LIBRARIES.join(" and ")))
}

/// Asks the backend for its version and for each device.
fn backend() -> Vec<Finding> {
    match ask() {
        Err(error) => {
            let remedy = match error.hint() {
                // The library's hints are for programs that it is loaded into.
                Some(_) => "Start this guest's backend, which runs outside it.",
                None => {
                    "Start the backend anew; Wormhole must have the same version on host and guest."
                }
            };
            vec![Finding {
                what: "backend",
                found: Err(Fault::new(error.to_string(), remedy)),
            }]
        }
        Ok(devices) => describe(&devices),
    }
}

/// Returns the facts of each device.
fn ask() -> Result<Vec<String>, ObserverError> {
    let mut observer = Observer::open()?;
    let first = observer.ask(0)?;
    let others = (1..first.devices).map(|device| Ok(observer.ask(device)?.facts));
    let others = others.collect::<Result<Vec<String>, ObserverError>>()?;
    Ok(match first.devices {
        0 => Vec::new(),
        _ => std::iter::once(first.facts).chain(others).collect(),
    })
}

fn describe(devices: &[String]) -> Vec<Finding> {
    let Some(first) = devices.first() else {
        return vec![Finding {
            what: "backend",
            found: Err(Fault::new(
                "it answers, and has no device for this guest",
                "Start the backend with a device: see `wormhole backend start --help`.",
            )),
        }];
    };
    let version = facts::number(first, facts::CUDA_VERSION).unwrap_or_default();
    let driver = facts::get(first, facts::DRIVER_VERSION)
        .map(|driver| format!(", driver {driver}"))
        .unwrap_or_default();
    let backend = format!(
        "it answers: CUDA {}.{}{driver}",
        version / 1000,
        version % 1000 / 10
    );
    let devices = devices.iter().map(|text| {
        let name = facts::get(text, facts::NAME).unwrap_or("without a name");
        let memory = facts::number(text, facts::TOTAL_MEMORY).unwrap_or_default();
        let [major, minor] = CAPABILITY.map(|number| {
            let name = format!("{}{number}", facts::ATTRIBUTE);
            facts::number(text, &name).unwrap_or_default()
        });
        format!(
            "{name}, compute capability {major}.{minor}, {} MiB",
            memory >> 20
        )
    });
    std::iter::once(("backend", backend))
        .chain(devices.map(|device| ("device", device)))
        .map(|(what, found)| Finding {
            what,
            found: Ok(found),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault<T: std::fmt::Debug>(found: Result<T, Fault>) -> String {
        let Fault { fault, remedy } = found.expect_err("it is a fault");
        format!("{fault}\n{remedy}")
    }

    #[test]
    fn kernels_are_compared_by_number() {
        for good in ["5.15.0-1", "6.1.0-56-cloud-amd64", "6.12.1", "10.0"] {
            assert_eq!(check_kernel(good.into()).as_deref(), Ok(good));
        }
        assert!(fault(check_kernel("5.4.0-200-generic".into())).contains("older than 5.15"));
    }

    #[test]
    fn each_state_of_the_window_has_its_own_remedy() {
        let device = |bytes, driver: Option<&str>| DaxDevice {
            name: "dax0.0".into(),
            bytes,
            driver: driver.map(str::to_owned),
        };
        let good = check_window(Some(device(256 << 20, Some("device_dax"))), None, true);
        assert_eq!(good.as_deref(), Ok("dax0.0, 256 MiB"));
        let pages = device(32 << 20, Some("device_dax"));
        let good = check_window(
            Some(device(224 << 20, Some("device_dax"))),
            Some(pages),
            true,
        );
        let said = "dax0.0, 224 MiB and 32 MiB for registered memory";
        assert_eq!(good.as_deref(), Ok(said));
        for (device, has_driver, remedy) in [
            (None, true, "under Wormhole"),
            (None, false, "modprobe -a dax_hmem device_dax"),
            (Some(device(0, None)), true, "wormhole-guest-window"),
            (
                Some(device(0, Some("device_dax"))),
                true,
                "wormhole-guest-window",
            ),
            (Some(device(1 << 30, Some("kmem"))), true, "blacklist kmem"),
        ] {
            let said = fault(check_window(device, None, has_driver));
            assert!(said.contains(remedy), "{said}");
        }
    }

    #[test]
    fn without_permission_the_error_names_the_group() {
        let denied = check_access(WINDOW, Err(io::ErrorKind::PermissionDenied.into()));
        assert!(fault(denied).contains("usermod -aG wormhole USER"));
        let missing = check_access(WINDOW, Err(io::ErrorKind::NotFound.into()));
        assert!(fault(missing).contains("udevadm trigger"));
        assert!(check_access(WINDOW, Ok(())).is_ok());
    }

    #[test]
    fn the_port_of_a_guest_needs_its_agent_and_is_preferred_to_vsock() {
        let check = |there: &[&str]| check_control(|path| there.contains(&path));
        assert_eq!(check(&[VSOCK]).as_deref(), Ok(VSOCK));
        assert!(check(&[VSOCK, PORT, AGENT]).is_ok_and(|found| found.starts_with(AGENT)));
        assert!(fault(check(&[VSOCK, PORT])).contains("wormhole-guest-control"));
        assert!(fault(check(&[])).contains("modprobe vmw_vsock_virtio_transport"));
    }

    #[test]
    fn memory_that_stays_on_the_host_is_no_fault_and_says_why() {
        assert!(check_faults(false).contains(FAULTS));
        assert!(!check_faults(true).contains(FAULTS));
    }

    #[test]
    fn the_libraries_that_the_loader_finds_first_must_be_ours() {
        let ours = "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/wormhole/libcuda.so.1\n";
        let nvml = "\tlibnvidia-ml.so.1 (libc6,x86-64) => /usr/lib/wormhole/libnvidia-ml.so.1\n";
        let other = "\tlibcuda.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libcuda.so.1\n";
        let check = |lines: &[&str]| check_libraries(&lines.concat());
        assert!(check(&[ours, other, nvml]).is_ok());
        assert!(fault(check(&[other, ours, nvml])).contains("load /lib/x86_64-linux-gnu/libcuda"));
        assert!(fault(check(&[ours])).contains("does not find libnvidia-ml.so.1"));
        assert!(fault(check(&[nvml])).contains("does not find libcuda.so.1"));
    }

    #[test]
    fn a_backend_is_described_by_its_facts() {
        let facts = "name=One\ncuda.version=13000\nattribute.75=9\nattribute.76=0\nmemory.total=1073741824\n";
        let text: String = describe(&[facts.to_owned(), facts.replace("One", "Two")])
            .iter()
            .map(line)
            .collect();
        assert_eq!(
            text,
            "ok    backend    it answers: CUDA 13.0\n\
             ok    device     One, compute capability 9.0, 1024 MiB\n\
             ok    device     Two, compute capability 9.0, 1024 MiB\n"
        );
        assert!(
            line(&describe(&[])[0]).starts_with("FAIL  backend    it answers, and has no device")
        );
    }
}
