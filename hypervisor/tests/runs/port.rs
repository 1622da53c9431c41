//! Control streams over a virtio-serial port, without a VM: this process has the agent, and a socket in the port's place.

use std::fs::OpenOptions;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread::{JoinHandle, spawn};

use rustix::process::{Pid, Signal, kill_process};
use wormhole_serial::{Mux, listen, serve};

use crate::harness::{
    PATIENCE, Underway, alone, eventually, finish, nothing_is_left, program, stage, wormhole,
};

/// A folder with the names of a guest.
struct Guest(tempfile::TempDir);

impl Guest {
    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn wormhole(&self, arguments: &[&str]) -> Command {
        let mut command = wormhole(arguments);
        command
            .current_dir(self.0.path())
            .env("WORMHOLE_RUNTIME", self.at("backends"));
        command
    }

    fn done(&self, arguments: &[&str]) -> String {
        let run = finish(&mut self.wormhole(arguments));
        assert!(run.status.success(), "{arguments:?}: {}", run.stderr);
        run.stdout
    }

    fn attach(&self) -> Underway {
        let options = ["attach", "--window", "window", "--serial", "serial"];
        let attached = Underway::start(&mut self.wormhole(&options));
        assert_eq!(
            attached.working(),
            "attached: window window of 258M, serial port serial\n"
        );
        attached
    }

    /// Connects a port, whose agent ends with it.
    fn connect(&self) -> (UnixStream, JoinHandle<()>) {
        let port = UnixStream::connect(self.at("serial")).expect("attach listens");
        port.set_nonblocking(true).expect("a socket");
        let listener = listen(&self.at("control")).expect("a socket");
        let end = port.try_clone().expect("a descriptor");
        let agent = spawn(move || {
            let served = serve(port.as_fd(), &mut Mux::agent(1), Some(&listener));
            served.expect("one version");
        });
        (end, agent)
    }

    /// Creates the command of a program of the guest.
    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(program("static", name));
        let control = format!("unix:{}", self.at("control").display());
        command
            .env("LD_LIBRARY_PATH", stage().join("lib/wormhole"))
            .env("WORMHOLE_CONTROL", control)
            .env("WORMHOLE_WINDOW", self.at("window"))
            .stdin(Stdio::null());
        command
    }

    fn passes(&self, name: &str) {
        let run = finish(&mut self.program(name));
        let said = format!("{}{}", run.stdout, run.stderr);
        assert!(said.contains(&format!("PASS {name}")), "{said}");
    }

    fn has_sessions(&self, count: usize) -> bool {
        let running = self.done(&["ps", "--json"]);
        let running: serde_json::Value = serde_json::from_str(&running).expect("JSON");
        running["backends"][0]["sessions"] == count
    }

    fn is_there(&self, name: &str) -> bool {
        self.at(name).symlink_metadata().is_ok()
    }
}

fn kill(process: &Underway) {
    let pid = Pid::from_raw(process.id().cast_signed()).expect("a process");
    kill_process(pid, Signal::KILL).expect("it runs");
}

#[test]
fn programs_work_through_a_port_and_end_with_either_side_of_it() {
    let _alone = alone();
    let guest = Guest(tempfile::tempdir().expect("a folder"));
    guest.done(&["backend", "start", "--trusted-tenants"]);
    let attached = guest.attach();
    // Another process that looks for the listener is no guest.
    drop(UnixStream::connect(guest.at("serial")).expect("attach listens"));
    let (port, agent) = guest.connect();
    std::thread::scope(|scope| {
        for name in ["vector_add", "reduction", "streams_events"] {
            scope.spawn(|| guest.passes(name));
        }
    });

    // The session of a process that is killed ends, while another goes on.
    let [killed, other] = [(), ()].map(|()| Underway::start(&mut guest.program("spin")));
    assert_eq!([killed.working(), other.working()], ["spinning\n"; 2]);
    // Those of the programs before may still be ending.
    eventually("two sessions", PATIENCE, || guest.has_sessions(2));
    kill(&killed);
    eventually("the end of its session", PATIENCE, || guest.has_sessions(1));
    killed.finish();

    // The guest ends with its monitor, and with it the attach.
    port.shutdown(std::net::Shutdown::Both).expect("it is open");
    agent.join().expect("it ends well");
    let ended = attached.finish();
    assert!(ended.status.success(), "{}", ended.stderr);
    assert!(other.finish().stdout.contains("FAIL spin"));
    assert!(!guest.is_there("window") && !guest.is_there("serial"));

    // A guest without an agent that has used the window ends with its monitor as well: the next one would find what it wrote.
    let attached = guest.attach();
    let port = UnixStream::connect(guest.at("serial")).expect("attach listens");
    let window = OpenOptions::new().write(true).open(guest.at("window"));
    let window = window.expect("a window");
    window.write_at(&[1], 64 << 20).expect("it is mapped");
    drop(port);
    let ended = attached.finish();
    assert!(ended.status.success(), "{}", ended.stderr);
    assert!(!guest.is_there("window") && !guest.is_there("serial"));

    // A program gets an error when its attach ends.
    let attached = guest.attach();
    let (_port, agent) = guest.connect();
    let orphan = Underway::start(&mut guest.program("spin"));
    assert_eq!(orphan.working(), "spinning\n");
    let detached = guest.done(&["detach", "--serial", "serial"]);
    assert_eq!(detached, "detached: serial port serial\n");
    let ended = attached.finish();
    assert!(ended.status.success(), "{}", ended.stderr);
    agent.join().expect("it ends well");
    let orphan = orphan.finish();
    let said = orphan.stdout;
    assert!(said.contains("cudaErrorSystemNotReady"), "{said}");
    assert!(!guest.is_there("window") && !guest.is_there("serial"));

    // Bytes that are no protocol harm the guest alone.
    let attached = guest.attach();
    let mut noise = UnixStream::connect(guest.at("serial")).expect("attach listens");
    noise
        .write_all(&[0xc0, 7, 7, 0xc0, 2, 0, 0, 0, 0, 0xc0])
        .expect("room");
    drop(noise);
    let (port, agent) = guest.connect();
    guest.passes("vector_add");
    port.shutdown(std::net::Shutdown::Both).expect("it is open");
    agent.join().expect("it ends well");
    let ended = attached.finish();
    assert!(ended.status.success(), "{}", ended.stderr);
    guest.done(&["backend", "stop"]);
    nothing_is_left();
}
