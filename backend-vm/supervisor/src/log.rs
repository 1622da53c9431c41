//! Log on standard error. A line for which the reader leaves no room is lost and counted, so that
//! writing never blocks.

use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::net::SendFlags;

/// Descriptor of the log that was opened last, which forked processes keep.
static NUMBER: AtomicI32 = AtomicI32::new(-1);

/// Returns the number of the log's descriptor, if there is a log.
pub fn number() -> Option<RawFd> {
    Some(NUMBER.load(Ordering::Relaxed)).filter(|number| *number >= 0)
}

/// Whether the log of this process, which was forked, is a socket instead of the file that was opened.
static IS_SOCKET: AtomicBool = AtomicBool::new(false);

/// States that the log's descriptor is a socket from now on.
pub fn became_socket() {
    IS_SOCKET.store(true, Ordering::Relaxed);
}

/// Standard error, written without blocking. A shared reference writes; each call is one line.
#[derive(Debug)]
pub struct Log {
    fd: OwnedFd,
    way: Way,
    /// Lines lost since the last line that was written.
    lost: AtomicU64,
    /// Whether the last line was written in part.
    cut: AtomicBool,
}

/// Method of writing a line without blocking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The file description is this process's own, and has O_NONBLOCK.
    Own,
    /// Each call has MSG_DONTWAIT.
    Socket,
    /// The file description is shared with other processes that expect it to block, so each write
    /// is preceded by poll(2).
    Shared,
    /// A regular file, for which writes do not wait for a reader.
    File,
}

impl Log {
    /// Opens standard error as it is now.
    ///
    /// # Errors
    /// Standard error is not open, or no descriptor is free.
    pub fn open() -> io::Result<Self> {
        let log = Self::on(io::stderr().as_fd().try_clone_to_owned()?)?;
        NUMBER.store(log.fd.as_raw_fd(), Ordering::Relaxed);
        Ok(log)
    }

    fn on(fd: OwnedFd) -> io::Result<Self> {
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode);
        let (fd, way) = match kind {
            FileType::RegularFile => (fd, Way::File),
            FileType::Socket => (fd, Way::Socket),
            // Opens a new file description: O_NONBLOCK on the inherited one would affect its other
            // holders.
            _ => match reopened(&fd) {
                Ok(own) => (own, Way::Own),
                Err(_) => (fd, Way::Shared),
            },
        };
        Ok(Self {
            fd,
            way,
            lost: AtomicU64::new(0),
            cut: AtomicBool::new(false),
        })
    }

    /// Writes a whole line or loses it. Returns false if the line is lost.
    fn put(&self, line: &[u8]) -> bool {
        let ended;
        let line = if self.cut.load(Ordering::Relaxed) {
            ended = [b"\n", line].concat();
            &ended
        } else {
            line
        };
        let way = match IS_SOCKET.load(Ordering::Relaxed) {
            true => Way::Socket,
            false => self.way,
        };
        let written = match way {
            Way::Own | Way::File => rustix::io::write(&self.fd, line),
            Way::Socket => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                rustix::net::send(&self.fd, line, flags)
            }
            Way::Shared if self.has_room() => {
                // A pipe with any room takes this many bytes at once (pipe(7)).
                rustix::io::write(&self.fd, &line[..line.len().min(libc::PIPE_BUF)])
            }
            Way::Shared => return false,
        };
        let Ok(count) = written else {
            return false;
        };
        self.cut.store(count < line.len(), Ordering::Relaxed);
        count == line.len()
    }

    fn has_room(&self) -> bool {
        let mut entry = [PollFd::new(&self.fd, PollFlags::OUT)];
        poll(&mut entry, Some(&Timespec::default())) == Ok(1)
    }
}

fn reopened(fd: &OwnedFd) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
}

impl Write for &Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let lost = self.lost.swap(0, Ordering::Relaxed);
        let noted = lost == 0 || self.put(format!("{lost} lines are lost\n").as_bytes());
        if !noted || !self.put(line) {
            let again = if noted { 0 } else { lost };
            self.lost.fetch_add(again + 1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    /// Fills a log until it loses lines, and checks their count. `read` drains the descriptor.
    fn loses_and_counts(log: &Log, mut read: impl FnMut() -> String) {
        let mut writer = log;
        let mut written = 0;
        while log.lost.load(Ordering::Relaxed) < 10 {
            writer.write_all(b"a line like another\n").unwrap();
            written += 1;
        }
        let there = read();
        writer.write_all(b"the next\n").unwrap();
        let after = read();
        let whole = there.matches("a line like another\n").count();
        assert!(
            after.ends_with(&format!("{} lines are lost\nthe next\n", written - whole)),
            "{written} written, {whole} there, then: {after}"
        );
    }

    #[test]
    fn lines_that_a_pipes_reader_leaves_are_lost_and_counted() {
        let (reader, writer) = io::pipe().unwrap();
        rustix::io::ioctl_fionbio(&reader, true).unwrap();
        let read = || {
            let mut text = Vec::new();
            // Ends with `WouldBlock`.
            let _ = (&reader).read_to_end(&mut text);
            String::from_utf8(text).unwrap()
        };
        let log = Log::on(writer.try_clone().unwrap().into()).unwrap();
        assert_eq!(log.way, Way::Own);
        loses_and_counts(&log, read);
        let flags = rustix::fs::fcntl_getfl(&writer).unwrap();
        assert!(!flags.contains(OFlags::NONBLOCK), "its other holder's");
        let log = Log {
            way: Way::Shared,
            ..Log::on(writer.into()).unwrap()
        };
        loses_and_counts(&log, read);
    }

    #[test]
    fn lines_that_a_sockets_reader_leaves_are_lost_and_counted() {
        let (mut reader, writer) = UnixStream::pair().unwrap();
        reader.set_nonblocking(true).unwrap();
        let log = Log::on(writer.into()).unwrap();
        loses_and_counts(&log, || {
            let mut text = Vec::new();
            let _ = reader.read_to_end(&mut text);
            String::from_utf8(text).unwrap()
        });
    }
}
