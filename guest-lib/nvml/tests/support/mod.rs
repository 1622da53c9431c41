//! Loads the library as programs do, and runs a backend inside the test process.

#![allow(dead_code, reason = "each test uses its part")]

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::linux::fs::MetadataExt;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use libloading::Library;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;
use wormhole_idl::Nvml;
use wormhole_ring::control::{HEADER_BYTES, Header, Message};

/// Returns the path of the shared library beside this test.
pub fn library() -> PathBuf {
    let mut folder = std::env::current_exe().expect("the test has a path");
    folder.pop();
    let beside = folder.join("libnvidia_ml.so");
    if beside.exists() {
        return beside;
    }
    folder.pop();
    folder.join("libnvidia_ml.so")
}

pub fn table() -> Nvml {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared-ring/api");
    Nvml::load(folder.as_ref()).expect("the table")
}

/// Returns a function of the library.
pub fn function<F: Copy>(library: &Library, name: &str) -> F {
    // SAFETY: the callers pass the prototype of the function.
    let found = unsafe { library.get::<F>(name.as_bytes()) };
    *found.unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Returns the inode of a descriptor's file, if it is open.
pub fn inode(descriptor: RawFd) -> Option<u64> {
    let file = std::fs::metadata(format!("/proc/self/fd/{descriptor}"));
    file.ok().map(|file| file.st_ino())
}

/// A backend with configurable answers.
#[derive(Clone, Default)]
pub struct Backend {
    pub facts: Arc<Mutex<String>>,
    pub devices: Arc<AtomicU32>,
    /// Number of streams opened so far.
    pub streams: Arc<AtomicU32>,
    /// Inode of the library's end of the last stream.
    pub inode: Arc<AtomicU64>,
    /// Number of queries received so far.
    pub questions: Arc<AtomicU32>,
}

impl Backend {
    /// Starts a backend and sets WORMHOLE_CONTROL of this process to it.
    pub fn start(facts: &str) -> Self {
        let backend = Self::default();
        backend.devices.store(1, Ordering::Relaxed);
        backend.say(facts);
        let name = format!("wormhole-nvml-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).expect("a short name");
        let listener = UnixListener::bind_addr(&address).expect("a name of our own");
        // SAFETY: nothing else in this process reads or writes the environment.
        unsafe { std::env::set_var("WORMHOLE_CONTROL", format!("unix:@{name}")) };
        let serving = backend.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                let (stream, library) = UnixStream::pair().expect("sockets");
                let given = inode(library.as_raw_fd()).expect("it is open");
                serving.inode.store(given, Ordering::Relaxed);
                let sent = connection.send_with_fd(&[0][..], library.as_raw_fd());
                sent.expect("the library listens");
                drop(library);
                serving.streams.fetch_add(1, Ordering::Relaxed);
                let serving = serving.clone();
                std::thread::spawn(move || serving.serve(stream));
            }
        });
        backend
    }

    /// Sets the facts of the devices, separated by empty lines. Further devices have the facts of the last one.
    pub fn say(&self, facts: &str) {
        facts.clone_into(&mut self.facts.lock().expect("not poisoned"));
    }

    /// Answers queries until the stream ends, each in two parts.
    fn serve(&self, mut stream: UnixStream) {
        let mut header = [0; HEADER_BYTES];
        while stream.read_exact(&mut header).is_ok() {
            let header = Header::decode(&header).expect("a header");
            let mut body = vec![0; header.body_len];
            stream.read_exact(&mut body).expect("a body");
            let Ok(Message::Observe(observe)) = Message::decode(header.kind, &body) else {
                panic!("the library sends nothing but questions");
            };
            self.questions.fetch_add(1, Ordering::Relaxed);
            let facts = self.facts.lock().expect("not poisoned").clone();
            let devices = self.devices.load(Ordering::Relaxed);
            let blocks = facts.split_inclusive("\n\n");
            let facts = match blocks.take(observe.device as usize + 1).last() {
                Some(facts) if observe.device < devices => facts,
                _ => "",
            };
            let half = facts.find('\n').map_or(0, |end| end + 1);
            for (more, part) in [(1, &facts[..half]), (0, &facts[half..])] {
                let answer = Message::Observation {
                    device: observe.device,
                    devices,
                    more,
                    facts: part,
                };
                stream
                    .write_all(&answer.to_vec().expect("short"))
                    .expect("it is read");
            }
        }
    }
}
