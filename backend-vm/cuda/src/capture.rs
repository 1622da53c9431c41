//! Capture of the text that kernels print.
//!
//! The driver writes the text of device `printf` to the process's standard output when it synchronizes, and the text
//! of `assert` to its standard error (measured on driver 580). A worker prints nothing of its own there, so both
//! descriptors are replaced by `memfd` files, from which the text is read. A full pipe would block the driver. A file
//! grows to [`MOST_KEPT`] bytes: a kernel's format of a few bytes with a great width expands to gigabytes of host
//! memory. Further text is lost, as it is when the device's own buffer is full.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, OnceLock};

use rustix::fs::{MemfdFlags, memfd_create};
use wormhole_device::DeviceOutput;
use wormhole_lock::Mutex;

/// Greatest number of bytes of each kind that one call takes.
const MOST: u64 = 16 << 20;
/// Greatest number of untaken bytes of each kind.
const MOST_KEPT: u64 = 128 << 20;

static CAPTURE: OnceLock<Capture> = OnceLock::new();

#[derive(Debug)]
struct Capture {
    stdout: Mutex<Source>,
    stderr: Mutex<Source>,
}

/// Duplicates of the process's standard output and error from before the capture.
#[derive(Debug)]
pub struct Originals {
    pub stdout: File,
    pub stderr: File,
}

/// Redirects the process's standard output and error permanently. Logs belong on the originals, which are returned;
/// panic messages already go there.
///
/// `RLIMIT_FSIZE` limits all files of this process to [`MOST_KEPT`] bytes from here on.
///
/// Without this call [`take`] finds nothing and the text appears on the process's standard output and error.
pub fn capture_output() -> io::Result<Originals> {
    let originals = Originals {
        stdout: File::from(io::stdout().as_fd().try_clone_to_owned()?),
        stderr: File::from(io::stderr().as_fd().try_clone_to_owned()?),
    };
    limit_files()?;
    let capture = Capture {
        stdout: Mutex::new(Source::redirect(libc::STDOUT_FILENO)?),
        stderr: Mutex::new(Source::redirect(libc::STDERR_FILENO)?),
    };
    if CAPTURE.set(capture).is_err() {
        return Err(io::Error::other("the process's output is captured already"));
    }
    let panics = Arc::new(originals.stderr.try_clone()?);
    std::panic::set_hook(Box::new(move |info| {
        // A failed write has no other place to be reported.
        let _ = writeln!(&*panics, "{info}");
    }));
    Ok(originals)
}

/// Takes the text written since the last call.
pub fn take() -> DeviceOutput {
    let Some(capture) = CAPTURE.get() else {
        return DeviceOutput::default();
    };
    // SAFETY: with a null argument every stream of the C library is flushed.
    unsafe { libc::fflush(std::ptr::null_mut()) };
    let take = |source: &Mutex<Source>| {
        let mut source = source.lock();
        source.take().unwrap_or_else(|error| {
            tracing::error!(%error, "text that a kernel printed is lost");
            Vec::new()
        })
    };
    DeviceOutput {
        stdout: take(&capture.stdout),
        stderr: take(&capture.stderr),
    }
}

/// Makes writes beyond [`MOST_KEPT`] fail with `EFBIG` instead of ending the process.
fn limit_files() -> io::Result<()> {
    let limit = libc::rlimit {
        rlim_cur: MOST_KEPT,
        rlim_max: MOST_KEPT,
    };
    // SAFETY: ignoring a signal installs no code, and the limit is read from a live structure.
    let failed = unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN) == libc::SIG_ERR
            || libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) != 0
    };
    if failed {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Memory file that replaces a descriptor of the process.
#[derive(Debug)]
struct Source {
    descriptor: RawFd,
    current: Text,
    /// Previous file, in which a write that had begun may still end.
    former: Option<Text>,
}

/// File, and number of bytes taken from it.
#[derive(Debug)]
struct Text {
    file: File,
    taken: u64,
}

impl Source {
    fn redirect(descriptor: RawFd) -> io::Result<Self> {
        Ok(Self {
            descriptor,
            current: Text::behind(descriptor)?,
            former: None,
        })
    }

    fn take(&mut self) -> io::Result<Vec<u8>> {
        if let Some(former) = &mut self.former {
            let rest = former.take()?;
            if !rest.is_empty() {
                return Ok(rest);
            }
            self.former = None;
        }
        let text = self.current.take()?;
        // An emptied file keeps its length, and its length is limited: replaces it in time.
        if self.current.taken >= MOST {
            let fresh = Text::behind(self.descriptor)?;
            self.former = Some(std::mem::replace(&mut self.current, fresh));
        }
        Ok(text)
    }
}

impl Text {
    /// Opens a new memory file and duplicates it onto the descriptor.
    fn behind(descriptor: RawFd) -> io::Result<Self> {
        let file = memfd_create(c"device-output", MemfdFlags::CLOEXEC)?;
        let file = File::from(file);
        // SAFETY: both descriptors are open; the target is the one to be replaced.
        if unsafe { libc::dup2(file.as_raw_fd(), descriptor) } < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { file, taken: 0 })
    }

    fn take(&mut self) -> io::Result<Vec<u8>> {
        let bytes = (self.file.metadata()?.len() - self.taken).min(MOST);
        let mut text = vec![0; usize::try_from(bytes).unwrap_or(usize::MAX)];
        self.file.read_exact_at(&mut text, self.taken)?;
        if bytes > 0 {
            self.taken += bytes;
            self.free_taken()?;
        }
        Ok(text)
    }

    /// Frees the memory of the taken text. The file keeps its length, since a writer may be at its end.
    fn free_taken(&self) -> io::Result<()> {
        wormhole_device::file::punch_hole(&self.file, 0, self.taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a test in a child process, since the redirection stays. Returns true in the child.
    fn in_own_process(test: &str) -> bool {
        const CHILD: &str = "WORMHOLE_TEST_CAPTURE";
        if std::env::var_os(CHILD).is_some() {
            return true;
        }
        let me = std::env::current_exe().expect("own path");
        let status = std::process::Command::new(me)
            .args(["--exact", &format!("capture::tests::{test}")])
            .env(CHILD, "1")
            .status()
            .expect("start");
        assert!(status.success());
        false
    }

    #[test]
    fn text_beyond_the_limit_is_lost_and_the_next_is_not() {
        if !in_own_process("text_beyond_the_limit_is_lost_and_the_next_is_not") {
            return;
        }
        let originals = capture_output().expect("capture");
        let line = [b'x'; 1 << 20];
        for _ in 0..3 {
            let written = (0..(2 * MOST_KEPT) >> 20)
                .take_while(|_| io::stderr().write_all(&line).is_ok())
                .count() as u64;
            assert!(((MOST_KEPT - MOST) >> 20..=MOST_KEPT >> 20).contains(&written));
            let mut taken = 0;
            loop {
                let text = take().stderr;
                if text.is_empty() {
                    break;
                }
                assert!(text.len() as u64 <= MOST && text.iter().all(|byte| *byte == b'x'));
                taken += text.len() as u64;
            }
            assert_eq!(taken, written << 20);
        }
        drop(originals);
    }

    #[test]
    fn what_the_process_writes_is_taken_once_by_kind() {
        if !in_own_process("what_the_process_writes_is_taken_once_by_kind") {
            return;
        }
        let print = |text: &std::ffi::CStr| {
            // SAFETY: a format without conversions.
            unsafe { libc::printf(text.as_ptr()) };
        };
        let originals = capture_output().expect("capture");
        print(c"buffered by the C library");
        // Not eprint!, which the test harness captures.
        io::stderr().write_all(b"an assertion").expect("write");
        let first = take();
        print(c"more");
        let second = take();
        let third = take();
        drop(originals);
        assert_eq!(first.stdout, b"buffered by the C library");
        assert_eq!(first.stderr, b"an assertion");
        assert_eq!(
            (second.stdout, second.stderr),
            (b"more".to_vec(), Vec::new())
        );
        assert!(third.stdout.is_empty());
        assert!(capture_output().is_err());
    }
}
