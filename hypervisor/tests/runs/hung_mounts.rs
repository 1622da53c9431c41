//! Tests runs on file systems that never answer, like a network file system whose server is gone: a waiting run can be
//! ended, and delays no other run.

use std::ffi::CString;
use std::fs::{File, OpenOptions, create_dir};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::Signal;

use crate::harness::{PATIENCE, alone, descendants, end_by, eventually, finish, program, wormhole};

/// A FUSE mount whose daemon answers FUSE_INIT and then reads no further request. It is unmounted on drop.
///
/// The mount is one level below its temporary folder: pytest, which other tests run, looks into each folder of /tmp, and
/// its request would be taken for the run's.
struct HungMount {
    /// The daemon's descriptor of /dev/fuse. Its last close ends all waits.
    device: Option<File>,
    folder: tempfile::TempDir,
}

impl HungMount {
    fn new() -> io::Result<Self> {
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/fuse")?;
        let mut mount = Self {
            folder: tempfile::tempdir()?,
            device: None,
        };
        create_dir(mount.path(""))?;
        let data = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0",
            device.as_raw_fd()
        );
        let (place, data) = (mount.place(), CString::new(data)?);
        // SAFETY: four C strings that outlive the call.
        let mounted = unsafe {
            libc::mount(
                c"hung".as_ptr(),
                place.as_ptr(),
                c"fuse".as_ptr(),
                libc::MS_NOSUID | libc::MS_NODEV,
                data.as_ptr().cast(),
            )
        };
        if mounted != 0 {
            return Err(io::Error::last_os_error());
        }
        let device = mount.device.insert(device);
        answer_init(device)?;
        Ok(mount)
    }

    fn place(&self) -> CString {
        CString::new(self.path("").as_os_str().as_bytes()).expect("a path has no zeros")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("mount").join(name)
    }

    /// Returns true if a process waits for an answer. Its request stays unread, so the process can be killed.
    fn is_waited_for(&self) -> bool {
        let device = self.device.as_ref().expect("it is open");
        let mut polled = libc::pollfd {
            fd: device.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one live structure, and no waiting.
        unsafe { libc::poll(&raw mut polled, 1, 0) > 0 }
    }
}

impl Drop for HungMount {
    fn drop(&mut self) {
        drop(self.device.take());
        let place = self.place();
        // SAFETY: a C string that outlives the call. The call fails if nothing is mounted there.
        unsafe { libc::umount2(place.as_ptr(), libc::MNT_DETACH) };
    }
}

/// Answers the kernel's first request, in the protocol of linux/fuse.h: `fuse_in_header`, then `fuse_out_header` and
/// `fuse_init_out`. Without FUSE_PARALLEL_DIROPS a lookup that waits for another one cannot be killed.
fn answer_init(device: &mut File) -> io::Result<()> {
    const VERSION_READAHEAD_FLAGS: [u32; 4] = [7, 31, 0, 1 << 18];
    const HEADER: usize = 16;
    const INIT_OUT: usize = 64;
    let mut request = vec![0; 1 << 16];
    let length = device.read(&mut request)?;
    if length < HEADER {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut answer = Vec::new();
    answer.extend(u32::try_from(HEADER + INIT_OUT).unwrap_or(0).to_ne_bytes());
    answer.extend(0i32.to_ne_bytes());
    // The request's `unique` field, which follows `len` and `opcode`.
    answer.extend(&request[8..16]);
    answer.extend(
        VERSION_READAHEAD_FLAGS
            .iter()
            .flat_map(|number| number.to_ne_bytes()),
    );
    answer.resize(HEADER + INIT_OUT, 0);
    device.write_all(&answer)
}

fn in_process(options: &[&str], option: Option<&Path>, program: &Path) -> Command {
    let mut command = wormhole(&["run", "--placement", "process"]);
    command.args(options).args(option).arg("--").arg(program);
    command
}

#[test]
fn a_run_that_waits_for_a_hung_file_system_ends_when_asked_and_its_neighbour_computes() {
    let mount = match HungMount::new() {
        Ok(mount) => mount,
        Err(error) => {
            println!("skipped: no file system can be mounted by /dev/fuse here: {error}");
            return;
        }
    };
    let _alone = alone();
    let computes = program("static", "vector_add");
    let (on_it, json) = (mount.path("program"), mount.path("summary"));
    let hung = [
        (&[][..], None, &*on_it),
        (&["--json"], Some(&*json), &*computes),
    ];
    for (options, option, started) in hung {
        for signal in [Signal::TERM, Signal::KILL] {
            let mut launcher = in_process(options, option, started)
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("it starts");
            eventually("a request to the file system", PATIENCE, || {
                mount.is_waited_for()
            });
            let all = descendants(launcher.id());
            let neighbour = finish(&mut in_process(&[], None, &computes));
            assert!(neighbour.stdout.contains("PASS"), "{}", neighbour.stderr);
            end_by(&mut launcher, signal);
            eventually("the end of all it started", PATIENCE, || {
                let mut left = all.iter().map(|pid| format!("/proc/{pid}"));
                !left.any(|process| Path::new(&process).exists())
            });
            eventually("the request's end", PATIENCE, || !mount.is_waited_for());
        }
    }
    // At `process` placement a run creates no temporary files.
    let unhurt = finish(in_process(&[], None, &computes).env("TMPDIR", mount.path("")));
    assert!(unhurt.stdout.contains("PASS"), "{}", unhurt.stderr);
}
