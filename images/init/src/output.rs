//! Opens sinks: vsock connections, devices and the console.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use wormhole_init::Sink;

/// Time limit for a device to appear.
const APPEARANCE: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    #[error("cannot connect to port {port} of vsock address {cid}: {source}")]
    Connect {
        cid: u32,
        port: u32,
        source: io::Error,
    },
    #[error("cannot open {path}: {source}")]
    Open { path: String, source: io::Error },
    #[error("cannot say that a stream is read: {0}")]
    Ready(io::Error),
    #[error("cannot make a pipe: {0}")]
    Pipe(io::Error),
}

/// An open sink.
#[derive(Debug)]
pub struct Stream {
    file: File,
    connection: bool,
}

/// Prints a message on the console. Ignores failures, since there is no further fallback.
pub fn console(text: &str) {
    if let Ok(mut console) = OpenOptions::new().write(true).open("/dev/console") {
        let _ = writeln!(console, "wormhole-init: {text}");
    }
}

pub fn open(sink: &Sink) -> Result<Stream, OutputError> {
    match sink {
        Sink::Console => device("/dev/console".as_ref()),
        Sink::Device(path) => device(path),
        &Sink::Vsock { cid, port } => connect(cid, port)
            .map(|socket| Stream {
                file: File::from(socket),
                connection: true,
            })
            .map_err(|source| OutputError::Connect { cid, port, source }),
    }
}

/// Opens a sink, or the console if that fails.
pub fn open_or_console(sink: &Sink) -> Result<Stream, OutputError> {
    open(sink).or_else(|error| {
        console(&format!("{error}; using the console"));
        open(&Sink::Console)
    })
}

fn device(path: &Path) -> Result<Stream, OutputError> {
    let fail = |source| OutputError::Open {
        path: path.display().to_string(),
        source,
    };
    let file = appear(path).map_err(fail)?;
    if path != "/dev/console" {
        make_raw(&file);
    }
    Ok(Stream {
        file,
        connection: false,
    })
}

/// Opens a device. A virtio port's device appears some time after its driver is loaded.
fn appear(path: &Path) -> io::Result<File> {
    let start = Instant::now();
    loop {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NOCTTY);
        match options.open(path) {
            Err(error)
                if error.kind() == io::ErrorKind::NotFound && start.elapsed() < APPEARANCE =>
            {
                thread::sleep(Duration::from_millis(5));
            }
            other => return other,
        }
    }
}

/// Sets a terminal to raw mode, so that it does not translate line breaks. Does nothing for other files.
fn make_raw(file: &File) {
    // SAFETY: all zeroes is a valid termios, which tcgetattr overwrites.
    let mut modes: libc::termios = unsafe { mem::zeroed() };
    // SAFETY: the descriptor is open, and `modes` is a writable termios.
    if unsafe { libc::tcgetattr(file.as_raw_fd(), &raw mut modes) } != 0 {
        return;
    }
    // SAFETY: `modes` is a valid termios; the calls access nothing else.
    unsafe {
        libc::cfmakeraw(&raw mut modes);
        libc::tcsetattr(file.as_raw_fd(), libc::TCSANOW, &raw const modes);
    }
}

fn connect(cid: u32, port: u32) -> io::Result<OwnedFd> {
    // SAFETY: socket takes no pointers.
    let socket = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: all zeroes is a valid sockaddr_vm.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    address.svm_family = libc::sa_family_t::try_from(libc::AF_VSOCK).unwrap_or_default();
    address.svm_cid = cid;
    address.svm_port = port;
    let length = libc::socklen_t::try_from(size_of_val(&address)).unwrap_or_default();
    // SAFETY: the address is a sockaddr_vm of the given length.
    let result = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if result == 0 {
        Ok(socket)
    } else {
        Err(io::Error::last_os_error())
    }
}

impl Stream {
    /// Sends `!` to the other side to signal readiness, then returns the file for reading.
    pub fn into_source(mut self) -> Result<File, OutputError> {
        self.file.write_all(b"!").map_err(OutputError::Ready)?;
        Ok(self.file)
    }

    /// Ends the stream. Returns once the other side has read everything, however long a person takes to read it: the
    /// machine ends afterwards, and with it all that is not delivered.
    pub fn finish(mut self) {
        if !self.connection {
            // SAFETY: tcdrain takes a descriptor; it fails without effect if that is not a terminal.
            unsafe { libc::tcdrain(self.file.as_raw_fd()) };
            return;
        }
        // SAFETY: shutdown takes no pointers.
        unsafe { libc::shutdown(self.file.as_raw_fd(), libc::SHUT_WR) };
        // The other side closes the connection once it has read everything. Data from it is ignored.
        let mut ignored = [0; 256];
        while matches!(self.file.read(&mut ignored), Ok(1..)) {}
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_stream_ends_when_its_last_byte_is_read_however_late() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut stream = Stream {
            file: File::from(OwnedFd::from(ours)),
            connection: true,
        };
        stream.write_all(b"last").unwrap();
        let (said, heard) = mpsc::channel();
        let reader = thread::spawn(move || {
            // Longer than a person who looks away.
            thread::sleep(Duration::from_secs(6));
            let mut text = String::new();
            theirs.read_to_string(&mut text).unwrap();
            said.send(text).unwrap();
        });
        stream.finish();
        assert_eq!(heard.try_recv().as_deref(), Ok("last"));
        reader.join().unwrap();
    }
}
