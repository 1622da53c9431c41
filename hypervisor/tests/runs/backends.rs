//! Runs programs through backends that outlive them.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::documents;
use crate::harness::{
    Ended, Finished, PATIENCE, Underway, alone, descendants, eventually, finish, nothing_is_left,
    of_backends, program, running, stage, with_own_signals, wormhole,
};
use crate::signals::{Terminal, shell_words};

/// Option without which the supervisor needs cgroups, which not every system has.
const TRUSTED: &str = "--trusted-tenants";

/// Folder of backends of a test's own. Backends in it are stopped on drop.
pub struct Runtime(tempfile::TempDir);

impl Runtime {
    pub fn new() -> Self {
        Self(tempfile::tempdir().expect("a folder"))
    }

    /// Creates a command of `wormhole` that has its backends in the folder.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = wormhole(args);
        command.env("WORMHOLE_RUNTIME", self.path());
        command
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("backends")
    }

    /// Lets other users search the folder around it.
    fn open_to_all(&self) {
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(self.0.path(), mode).expect("it is ours");
    }

    pub fn finish(&self, args: &[&str]) -> Finished {
        finish(&mut self.command(args))
    }

    /// Starts a backend with these further options.
    pub fn start(&self, name: &str, options: &[&str]) {
        let started = self.finish(&[&["backend", "start", name, TRUSTED], options].concat());
        assert!(started.status.success(), "{}", started.stderr);
    }

    /// Creates a command of `wormhole run` through a backend.
    pub fn run(&self, backend: &str) -> Command {
        let mut command = self.command(&["run", "--placement", "process", "--backend"]);
        command.args([backend, "--"]);
        command
    }

    /// Asserts that a program passes through a backend.
    pub fn passes(&self, backend: &str, name: &str) {
        let run = finish(self.run(backend).arg(program("static", name)));
        assert!(run.status.success(), "{name}: {}", run.stderr);
        let passed = format!("PASS {name}");
        assert!(run.stdout.contains(&passed), "{}", run.stdout);
    }

    /// Starts a program that spins on the device.
    fn spinning(&self, backend: &str) -> Underway {
        let run = Underway::start(self.run(backend).arg(program("static", "spin")));
        assert!(run.working().contains("spinning"));
        run
    }

    fn list(&self) -> serde_json::Value {
        let list = self.finish(&["backend", "list", "--json"]);
        assert!(list.status.success(), "{}", list.stderr);
        serde_json::from_str(&list.stdout).expect("JSON")
    }

    /// Sends SIGKILL to the supervisor of the first backend, and waits for its end.
    fn kill_supervisor(&self) {
        let pid = self.list()[0]["pid"].as_i64().expect("a number");
        let pid = Pid::from_raw(i32::try_from(pid).expect("a process number")).expect("not 0");
        kill_process(pid, Signal::KILL).expect("it runs");
        nothing_is_left();
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        for folder in fs::read_dir(self.path()).into_iter().flatten().flatten() {
            let mut stop = self.command(&["backend", "stop"]);
            let stopped = stop.arg(folder.file_name()).output();
            drop(stopped.expect("the command starts"));
        }
    }
}

/// Asserts that a command fails with one sentence that contains `words`.
fn refused(run: &Finished, words: &str) {
    assert_eq!(run.status.code(), Some(2), "{}", run.stderr);
    let lines = run.stderr.lines().count();
    let is_sentence = lines == 1 && run.stderr.starts_with("wormhole");
    assert!(
        is_sentence && run.stderr.contains(words),
        "not one sentence that says {words}: {}",
        run.stderr
    );
}

/// Program that keeps data on the device until it reads a line, and then compares it.
const HOLDER: &str = "import ctypes, sys
cuda = ctypes.CDLL('libcuda.so.1')
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
context, address = ctypes.c_void_p(), ctypes.c_uint64()
call('cuInit', 0)
call('cuDevicePrimaryCtxRetain', ctypes.byref(context), 0)
call('cuCtxSetCurrent', context)
data = bytes(range(256)) * 4096
call('cuMemAlloc_v2', ctypes.byref(address), ctypes.c_size_t(len(data)))
call('cuMemcpyHtoD_v2', address, data, ctypes.c_size_t(len(data)))
print('it holds data', flush=True)
sys.stdin.readline()
copy = ctypes.create_string_buffer(len(data))
call('cuMemcpyDtoH_v2', copy, address, ctypes.c_size_t(len(data)))
print('PASS holder' if copy.raw == data else 'the data is wrong')";

/// Returns the figures in a line of the program `beside`, by name.
fn figures(line: &str) -> BTreeMap<String, String> {
    let parts = line
        .split_whitespace()
        .filter_map(|part| part.split_once('='));
    parts
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Asserts that a program's figures of its device do not change while another tenant allocates memory, and that the device
/// refuses a part of its cache to both. Returns the figures before the other tenant came and after it has left.
pub fn sees_nothing_of_its_neighbour(device: &str) -> [BTreeMap<String, String>; 2] {
    const OWN: u64 = 64 << 20;
    let runtime = Runtime::new();
    runtime.start("beside", &["--device", device]);
    let start = || {
        let mut run = runtime.run("beside");
        Underway::start(run.arg(program("static", "beside")).stdin(Stdio::piped()))
    };
    let mut first = start();
    let before = figures(&first.answer("look"));
    let mut second = start();
    assert_eq!(second.answer("take"), "taken\n");
    let beside = first.answer("look");
    assert_eq!(second.answer("take"), "taken\n");
    assert_eq!(
        first.answer("look"),
        beside,
        "after the neighbour allocated"
    );

    let seen = figures(&beside);
    let not_free: u64 = seen["not_free"].parse().expect("a number");
    assert!((OWN..OWN + (32 << 20)).contains(&not_free), "{beside}");
    assert_eq!(
        (&*seen["list"], &*seen["processes"]),
        ("0", "1"),
        "{beside}"
    );
    // NVML_ERROR_NOT_SUPPORTED.
    for name in ["power", "energy", "utilization"] {
        assert_eq!(seen[name], "3", "{beside}");
    }
    for line in [beside, second.answer("look")] {
        let persisting =
            "set=cudaErrorUnsupportedLimit get=cudaSuccess persisting=0 reset=cudaSuccess";
        assert!(line.contains(persisting), "{line}");
    }

    second.write_line("end");
    let ended = second.finish();
    assert!(ended.stdout.contains("PASS beside"), "{}", ended.stderr);
    eventually("the end of the neighbour", PATIENCE, || {
        let shown = runtime.finish(&["ps", "--json"]).stdout;
        let shown: serde_json::Value = serde_json::from_str(&shown).expect("JSON");
        shown["backends"][0]["tenants"] == 1
    });
    let after = figures(&first.answer("look"));
    first.write_line("end");
    let ended = first.finish();
    assert!(ended.stdout.contains("PASS beside"), "{}", ended.stderr);
    [before, after]
}

#[test]
fn a_tenant_sees_nothing_of_its_neighbour() {
    let _alone = alone();
    sees_nothing_of_its_neighbour("cpu");
}

#[test]
fn programs_share_a_backend_and_one_killed_harms_no_other() {
    let _alone = alone();
    let runtime = Runtime::new();
    runtime.start("shared", &[]);
    let mut holder = runtime.run("shared");
    holder.args(["python3", "-c", HOLDER]).stdin(Stdio::piped());
    let mut holder = Underway::start(&mut holder);
    assert!(holder.working().contains("it holds data"));
    let victim = runtime.spinning("shared");
    std::thread::scope(|scope| {
        for name in ["matrix_mul", "vector_add"] {
            scope.spawn(|| runtime.passes("shared", name));
        }
    });
    victim.kill_9("wormhole");
    victim.finish();
    eventually("the end of the killed program", PATIENCE, || {
        running("spin").is_empty()
    });
    holder.write_line("go on");
    let held = holder.finish();
    assert!(held.stdout.contains("PASS holder"), "{}", held.stderr);
    runtime.passes("shared", "vector_add");
    let socket = runtime.path().join("shared/socket");
    runtime.passes(&format!("unix:{}", socket.display()), "vector_add");

    let stopped = runtime.finish(&["backend", "stop", "shared"]);
    assert!(stopped.status.success(), "{}", stopped.stderr);
    assert_eq!(of_backends(), [] as [u32; 0]);
    assert!(!socket.parent().expect("its folder").exists());
}

#[test]
fn a_backend_that_is_stopped_is_an_error_in_its_programs() {
    let _alone = alone();
    let runtime = Runtime::new();
    runtime.start("default", &[]);
    let spinning = runtime.spinning("default");
    let mut quiet = runtime.run("default");
    quiet.args(["sh", "-c", "echo at work; read line"]);
    let mut quiet = Underway::start(quiet.stdin(Stdio::piped()));
    assert!(quiet.working().contains("at work"));
    let stopped = runtime.finish(&["backend", "stop"]);
    assert!(stopped.status.success(), "{}", stopped.stderr);

    let spun = spinning.finish();
    let error = "cudaDeviceSynchronize(): cudaErrorSystemNotReady";
    assert!(spun.stdout.contains(error), "{}", spun.stdout);
    quiet.write_line("go on");
    let quiet = quiet.finish();
    assert_eq!(quiet.status.code(), Some(69), "{}", quiet.stderr);
    let words = "the backend ended before the program";
    assert!(quiet.stderr.contains(words), "{}", quiet.stderr);
    assert_eq!(runtime.list(), serde_json::json!([]));
    refused(
        &runtime.finish(&["backend", "stop"]),
        "no backend default is running",
    );
}

#[test]
fn a_backend_is_started_again_after_a_kill() {
    let _alone = alone();
    let runtime = Runtime::new();
    runtime.start("again", &[]);
    runtime.kill_supervisor();
    assert_eq!(runtime.list(), serde_json::json!([]));
    let run = finish(runtime.run("again").arg("/bin/true"));
    refused(&run, "no backend again is running");
    let socket = runtime.path().join("again/socket");
    // The state after a power failure: the spawner had no time to remove the socket.
    if !socket.exists() {
        drop(std::os::unix::net::UnixListener::bind(&socket).expect("a stale socket"));
    }
    let run = finish(
        runtime
            .run(&format!("unix:{}", socket.display()))
            .arg("/bin/true"),
    );
    refused(&run, "no backend is there: nothing listens on");
    runtime.start("again", &[]);
    runtime.passes("again", "vector_add");
}

#[test]
fn one_of_several_starts_at_once_starts_the_backend() {
    let _alone = alone();
    let runtime = Runtime::new();
    let starts: Vec<Finished> = std::thread::scope(|scope| {
        let start = || runtime.finish(&["backend", "start", "one", TRUSTED]);
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(start)).collect();
        let ends = threads.into_iter().map(|thread| thread.join());
        ends.collect::<Result<_, _>>().expect("no panic")
    });
    let (started, others): (Vec<_>, Vec<_>) =
        starts.into_iter().partition(|start| start.status.success());
    assert_eq!(started.len(), 1, "{others:?}");
    for other in others {
        let word = match other.stderr.contains("is running already") {
            true => "backend one is running already, as process",
            false => "another command starts or stops backend one",
        };
        refused(&other, word);
    }
    let running = runtime.list();
    assert_eq!(running.as_array().map(Vec::len), Some(1), "{running}");
    runtime.passes("one", "vector_add");
}

#[test]
fn a_backend_that_cannot_serve_a_program_says_so() {
    let _alone = alone();
    let runtime = Runtime::new();
    let missing = [
        "backend",
        "start",
        "gpu",
        TRUSTED,
        "--device",
        "cuda:4000000000",
    ];
    refused(&runtime.finish(&missing), "backend gpu does not start: ");
    nothing_is_left();
    assert_eq!(
        fs::read_dir(runtime.path()).expect("it is there").count(),
        0
    );

    runtime.start(
        "full",
        &["--tenants-per-user", "1", "--window-limit", "64M"],
    );
    let run = |window| {
        let mut command = runtime.command(&["run", "--placement", "process", "--backend"]);
        finish(command.args(["full", "--window", window, "--", "/bin/echo", "it ran"]))
    };
    let mut only = runtime.command(&["run", "--placement", "process", "--backend", "full"]);
    let only = Underway::start(
        only.args(["--window", "64M", "--"])
            .arg(program("static", "spin")),
    );
    only.working();
    refused(&run("64M"), "--tenants-per-user allows 1");
    only.kill_9("spin");
    only.finish();
    // The first tenant counts until all of its processes have ended.
    let full = program("static", "full_window");
    let mut over = None;
    eventually("the end of the first tenant", PATIENCE, || {
        let mut command = runtime.command(&["run", "--placement", "process", "--backend", "full"]);
        let run = finish(command.args(["--"]).arg(&full));
        let waits = run.stderr.contains("--tenants-per-user");
        over = Some(run);
        !waits
    });
    // The default window is larger than the limit, which its use reaches.
    let over = over.expect("it ran");
    assert!(over.stdout.contains("PASS full_window"), "{}", over.stdout);
    let line = "64 MiB of it can be used, and wormhole backend start --window-limit allows more";
    assert!(over.stderr.contains(line), "{}", over.stderr);

    let record = runtime.path().join("full/record.json");
    let text = fs::read_to_string(&record).expect("the backend's record");
    let mut other: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    other["protocol"] = 1.into();
    other["version"] = "0.0.1".into();
    fs::write(&record, other.to_string()).expect("it is ours");
    refused(&run("64M"), "is of another version (wormhole 0.0.1)");
    fs::write(&record, text).expect("it is ours");
}

/// Program that copies a mebibyte to the device and launches a kernel, as often as its argument says, and waits for a
/// line.
const WORKER: &str = "import ctypes, sys
cuda = ctypes.CDLL('libcuda.so.1')
def call(name, *arguments):
    result = getattr(cuda, name)(*arguments)
    assert result == 0, (name, result)
context, module, function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
address = ctypes.c_uint64()
call('cuInit', 0)
call('cuDevicePrimaryCtxRetain', ctypes.byref(context), 0)
call('cuCtxSetCurrent', context)
code = b'.version 7.0\\n.target sm_70\\n.address_size 64\\n.visible .entry nothing() { ret; }\\0'
call('cuModuleLoadData', ctypes.byref(module), code)
call('cuModuleGetFunction', ctypes.byref(function), module, b'nothing')
data = bytes(1 << 20)
call('cuMemAlloc_v2', ctypes.byref(address), ctypes.c_size_t(len(data)))
for _ in range(int(sys.argv[1])):
    call('cuMemcpyHtoD_v2', address, data, ctypes.c_size_t(len(data)))
    call('cuLaunchKernel', function, 1, 1, 1, 1, 1, 1, 0, None, None, None)
call('cuCtxSynchronize')
print('it has worked', flush=True)
sys.stdin.readline()";

/// Asserts that figures of `wormhole stats` are those of a run's summary.
fn tells_of(figures: &serde_json::Value, summary: &serde_json::Value) {
    for name in [
        "local_calls",
        "records",
        "requests",
        "fences",
        "bytes_to_device",
        "bytes_from_device",
    ] {
        assert_eq!(figures[name], summary[name], "{name}");
        assert!(figures[name].is_u64(), "{name}: {figures}");
    }
    let launches = &summary["sessions"][0]["messages"]["LaunchKernel"];
    assert_eq!(&figures["launches"], launches);
}

#[test]
fn ps_and_stats_tell_of_each_tenant_as_its_summary_does() {
    let _alone = alone();
    let runtime = Runtime::new();
    let json = |args: &[&str]| -> serde_json::Value {
        let run = runtime.finish(args);
        assert!(run.status.success(), "{}", run.stderr);
        serde_json::from_str(&run.stdout).expect("one JSON object")
    };
    let stats = || json(&["stats", "told", "--json"])["tenants"].clone();
    let of = |run: &Underway| {
        let tenants = stats();
        let mut tenants = tenants.as_array().expect("a list").iter();
        let tenant = tenants.find(|tenant| tenant["process"] == run.id());
        tenant.expect("the run's tenant").clone()
    };
    runtime.start("told", &[]);
    let [two, three] = ["2", "3"].map(|count| {
        let summary = runtime.0.path().join(count);
        let mut command = runtime.command(&["run", "--placement", "process"]);
        command.args(["--backend", "told", "--json"]).arg(&summary);
        command.args(["--", "sh", "-c", "python3 -c \"$0\" $1; read line", WORKER]);
        let run = Underway::start(command.arg(count).stdin(Stdio::piped()));
        assert!(run.working().contains("it has worked"));
        (run, summary)
    });
    let (mut run, summary) = two;
    let other = &three.0;

    let running = json(&["ps", "--json"]);
    let backend = &running["backends"][0];
    assert_eq!(
        (&backend["name"], &backend["device"]),
        (&"told".into(), &"cpu".into())
    );
    assert_eq!(
        (&backend["tenants"], &backend["sessions"]),
        (&2.into(), &2.into())
    );
    assert_eq!(running["guests"], serde_json::json!([]));
    let text = runtime.finish(&["ps"]).stdout;
    let line = text.lines().find(|line| line.starts_with("told "));
    let cells: Vec<&str> = line.expect("a line").split_whitespace().collect();
    assert_eq!(cells[3..], ["2", "2", "cpu"], "{text}");

    for (run, launches) in [(&run, 2u64), (other, 3)] {
        let figures = of(run);
        assert_eq!(figures["launches"], launches, "{figures}");
        assert_eq!(
            (&figures["sessions"], &figures["ended_sessions"]),
            (&1.into(), &0.into())
        );
        assert_eq!(figures["is_current"], true);
        assert!(figures["vm_exits"].is_null() && figures["guest"].is_null());
        let [half, most] = ["request_p50_ns", "request_p99_ns"].map(|name| figures[name].as_u64());
        assert!(half.is_some() && half <= most, "{figures}");
        let memory = figures["device_memory"].as_u64();
        assert!(memory >= Some(1 << 20), "{figures}");
        let bytes = figures["bytes_to_device"].as_u64();
        assert!(bytes >= Some(launches << 20), "{figures}");
    }
    let text = runtime.finish(&["stats", "told"]).stdout;
    assert!(text.starts_with("backend told on cpu, up "), "{text}");
    for (run, launches) in [(&run, "2"), (other, "3")] {
        let rows = text.lines().map(|line| line.split_whitespace().collect());
        let mut rows =
            rows.filter(|cells: &Vec<&str>| cells.get(2) == Some(&&*run.id().to_string()));
        let row = rows.next().expect("a line");
        assert_eq!(
            (row[3], row[4], row[10], row[15]),
            ("-", "1", launches, "-"),
            "{text}"
        );
    }

    // At a terminal the figures are shown again and again.
    let header = text.lines().find(|line| line.starts_with("TENANT "));
    let repeated = runtime.command(&["stats", "told", "--interval", "1"]);
    let mut terminal = Terminal::start(&format!(
        "WORMHOLE_RUNTIME='{}' {}",
        runtime.path().display(),
        shell_words(&repeated)
    ));
    for _ in 0..2 {
        terminal.until(header.expect("a header").trim_end());
    }
    drop(terminal);

    run.write_line("end the program");
    let mut ended = of(&run);
    eventually("the end of the session", PATIENCE, || {
        ended = of(&run);
        ended["ended_sessions"] == 1
    });
    assert_eq!(
        (&ended["sessions"], &ended["device_memory"]),
        (&0.into(), &0.into())
    );
    assert_eq!(of(other)["sessions"], 1);
    run.write_line("end the run");
    let run = run.finish();
    assert!(run.status.success(), "{}", run.stderr);
    let text = fs::read_to_string(summary).expect("the run's summary");
    tells_of(&ended, &serde_json::from_str(&text).expect("JSON"));
    eventually("the end of the tenant", PATIENCE, || {
        stats().as_array().map(Vec::len) == Some(1)
    });
    assert_eq!(of(other)["launches"], 3);

    for (name, words) in [
        ("untold", "no backend untold is running"),
        ("unix:/no/socket", "nothing listens on /no/socket"),
    ] {
        refused(&runtime.finish(&["stats", name]), words);
    }
    let mut other = three.0;
    other.write_line("end the program");
    // The program's buffer would take a line that came earlier.
    eventually("the end of its session", PATIENCE, || {
        of(&other)["ended_sessions"] == 1
    });
    other.write_line("end the run");
    assert!(other.finish().status.success());
}

/// Starts a backend in the foreground, and waits until it has notified its service manager.
fn in_foreground(runtime: &Runtime) -> Ended {
    let socket = runtime.0.path().join("notify");
    let manager = UnixDatagram::bind(&socket).expect("a socket");
    manager
        .set_read_timeout(Some(PATIENCE))
        .expect("a valid time");
    let mut command = runtime.command(&["backend", "start", "fore", TRUSTED, "--foreground"]);
    command.env("NOTIFY_SOCKET", &socket).stderr(Stdio::null());
    let child = Ended(with_own_signals(&mut command).spawn().expect("it starts"));
    let mut word = [0; 64];
    let count = manager.recv(&mut word).expect("a word of the backend");
    assert_eq!(&word[..count], b"READY=1");
    fs::remove_file(socket).expect("it is ours");
    child
}

#[test]
fn a_backend_in_the_foreground_lives_as_long_as_its_command() {
    let _alone = alone();
    let runtime = Runtime::new();
    for signal in [Signal::TERM, Signal::INT, Signal::KILL] {
        let mut command = in_foreground(&runtime);
        runtime.passes("fore", "vector_add");
        kill_process(Pid::from_child(&command.0), signal).expect("it runs");
        let status = command.0.wait().expect("it is a child");
        assert_eq!(status.success(), signal != Signal::KILL, "{status}");
        nothing_is_left();
        assert_eq!(runtime.list(), serde_json::json!([]));
    }
    let mut command = in_foreground(&runtime);
    let stopped = runtime.finish(&["backend", "stop", "fore"]);
    assert!(stopped.status.success(), "{}", stopped.stderr);
    assert!(command.0.wait().expect("it is a child").success());
    let mut command = in_foreground(&runtime);
    runtime.kill_supervisor();
    assert_eq!(command.0.wait().expect("it is a child").code(), Some(2));
}

/// User and group id of `nobody`.
const NOBODY: u32 = 65534;

/// Returns whether the tests run as root, who alone can become another user.
fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("skipped: only root can become another user");
    }
    is_root
}

fn as_nobody(program: &str) -> Command {
    let mut command = Command::new(program);
    command.stdin(Stdio::null()).uid(NOBODY).gid(NOBODY);
    command
}

#[test]
fn no_other_user_can_lock_a_backend() {
    if !is_root() {
        return;
    }
    let _alone = alone();
    let runtime = Runtime::new();
    runtime.open_to_all();
    runtime.start("locked", &[]);
    let folder = runtime.path().join("locked");
    let locked = finish(
        as_nobody("flock")
            .args(["--nonblock".as_ref(), folder.as_os_str()])
            .arg("true"),
    );
    assert!(!locked.status.success());
    assert!(
        locked.stderr.contains("Permission denied"),
        "{}",
        locked.stderr
    );
    // Searching it is permitted.
    let found = finish(as_nobody("test").arg("-S").arg(folder.join("socket")));
    assert!(found.status.success(), "{}", found.stderr);
}

#[test]
fn a_backend_of_another_user_is_not_used() {
    const LISTENS: &str = "import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print('it listens', flush=True)
while True:
    connection = listener.accept()[0]";
    if !is_root() {
        return;
    }
    let _alone = alone();
    let runtime = Runtime::new();
    fs::set_permissions(runtime.0.path(), fs::Permissions::from_mode(0o777)).expect("it is ours");
    let socket = runtime.0.path().join("foreign");
    let mut other = as_nobody("python3");
    let other = Underway::start(other.args(["-c", LISTENS]).arg(&socket));
    other.working();
    let chosen = format!("unix:{}", socket.display());
    let run = finish(runtime.run(&chosen).arg("/bin/true"));
    refused(
        &run,
        "is that of user 65534, who would see the program's data",
    );
    other.kill_9("python3");
    other.finish();
}

#[test]
fn a_pipe_beside_a_socket_is_not_opened() {
    let _alone = alone();
    let runtime = Runtime::new();
    runtime.start("piped", &[]);
    let folder = runtime.path().join("piped");
    let record = fs::read(folder.join("record.json")).expect("the backend's record");
    let pipe = |path: &Path| {
        let made = Command::new("mkfifo").arg(path).status();
        assert!(made.expect("it is there").success());
    };
    fs::remove_file(folder.join("record.json")).expect("it is ours");
    pipe(&folder.join("record.json"));
    runtime.passes(
        &format!("unix:{}", folder.join("socket").display()),
        "vector_add",
    );
    let listed = runtime.finish(&["backend", "list"]);
    let said = "record.json is a link, of another kind";
    assert!(listed.stderr.contains(said), "{}", listed.stderr);
    assert!(listed.status.success(), "{}", listed.stderr);
    fs::remove_file(folder.join("record.json")).expect("it is ours");
    fs::write(folder.join("record.json"), record).expect("it is ours");
}

#[test]
fn a_command_that_comes_late_leaves_a_later_backend_of_its_name() {
    let _alone = alone();
    let runtime = Runtime::new();
    let mut command = in_foreground(&runtime);
    let stop = |signal| kill_process(Pid::from_child(&command.0), signal).expect("it runs");
    stop(Signal::STOP);
    assert!(
        runtime
            .finish(&["backend", "stop", "fore"])
            .status
            .success()
    );
    runtime.start("fore", &[]);
    stop(Signal::CONT);
    command.0.wait().expect("it is a child");
    runtime.passes("fore", "vector_add");
}

#[test]
fn a_backend_has_neither_descriptors_nor_secrets_of_its_starter() {
    let _alone = alone();
    let runtime = Runtime::new();
    let start = runtime.command(&["backend", "start", "clean", TRUSTED]);
    let mut shell = Command::new("bash");
    shell.args(["-c", "exec 9>\"$0\"; \"$@\""]);
    shell.arg(runtime.0.path().join("lock"));
    shell.arg(start.get_program()).args(start.get_args());
    shell.env("WORMHOLE_RUNTIME", runtime.path());
    shell.env("A_TOKEN", "secret").env("CUDA_TEST", "1");
    let started = finish(shell.stdin(Stdio::null()));
    assert!(started.status.success(), "{}", started.stderr);
    let pid = runtime.list()[0]["pid"].as_u64().expect("a number");
    let inherited = fs::read_link(format!("/proc/{pid}/fd/9"));
    let lock = runtime.0.path().join("lock");
    assert!(inherited.is_err() || inherited.is_ok_and(|file| file != lock));
    let variables = fs::read(format!("/proc/{pid}/environ")).expect("it runs");
    let variables = String::from_utf8_lossy(&variables);
    assert!(!variables.contains("A_TOKEN"), "{variables}");
    assert!(variables.contains("CUDA_TEST=1"), "{variables}");
}

#[test]
fn a_run_ends_although_its_backend_stands() {
    let _alone = alone();
    let runtime = Runtime::new();
    runtime.start("stands", &[]);
    let mut run = runtime.run("stands");
    run.args(["sh", "-c", "echo at work; read line"]);
    let mut run = Underway::start(run.stdin(Stdio::piped()));
    run.working();
    let pid = runtime.list()[0]["pid"].as_u64().expect("a number");
    let pid = u32::try_from(pid).expect("a process number");
    let signal_all = |signal| {
        for process in descendants(pid) {
            let process = i32::try_from(process).ok().and_then(Pid::from_raw);
            // One of them may have ended.
            let _ = kill_process(process.expect("a process number"), signal);
        }
    };
    signal_all(Signal::STOP);
    run.write_line("go on");
    let run = run.finish();
    signal_all(Signal::CONT);
    assert_eq!(run.status.code(), Some(69), "{}", run.stderr);
    assert!(
        run.stderr
            .contains("has not reported the end of its sessions"),
        "{}",
        run.stderr
    );
    runtime.passes("stands", "vector_add");
}

const UNITS: [&str; 2] = ["wormhole-backend.service", "wormhole-backend@.service"];

/// The unit of backend VMs.
pub const VM_UNIT: &str = "wormhole-backend-vm@.service";

/// The unit of guests.
const GUEST_UNIT: &str = "wormhole-guest@.service";

/// Returns a unit, with the path of the staged command.
fn unit(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../images/units");
    let unit = fs::read_to_string(folder.join(name)).expect("the unit");
    let staged = stage().join("bin/wormhole");
    let staged = staged.to_str().expect("a path in UTF-8");
    assert!(unit.contains("/usr/bin/wormhole"));
    unit.replace("/usr/bin/wormhole", staged)
}

#[test]
fn the_units_of_backends_and_guests_are_valid() {
    let verify = |name: &str, unit: &str| {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join(name);
        fs::write(&path, unit).expect("room");
        let mut command = Command::new("systemd-analyze");
        command.arg("verify").arg(path).output()
    };
    // The journal has no limit for a guest's console, nor the terminals to which it writes lines of the highest priority.
    assert!(unit(GUEST_UNIT).contains("\nStandardOutput=null\n"));
    for name in UNITS.into_iter().chain([VM_UNIT, GUEST_UNIT]) {
        assert!(unit(name).contains("\nSyslogLevelPrefix=no\n"), "{name}");
        let verified = match verify(name, &unit(name)) {
            Err(error) => {
                println!("skipped: systemd-analyze cannot be started: {error}");
                return;
            }
            Ok(verified) => verified,
        };
        let said = String::from_utf8_lossy(&verified.stderr);
        assert!(verified.status.success(), "{said}");
        assert!(!said.contains("wormhole-"), "{said}");
        let wrong = unit(name).replace("Type=notify", "Typ=notify");
        let wrong = verify(name, &wrong).expect("as before");
        let said = String::from_utf8_lossy(&wrong.stderr);
        assert!(said.contains("'Typ'"), "{said}");
    }
}

/// systemd warns about a drop-in with a mistake. It prints no warning about the drop-in of the page.
#[test]
fn the_drop_in_that_orders_a_guest_after_its_backend_is_valid() {
    const NAME: &str = "wormhole-guest@debian.service";
    let drop_in = documents::blocks_of(&documents::root().join("docs/guests.md"), "text");
    let drop_in = drop_in.iter().find(|block| block.contains("[Service]"));
    let (place, drop_in) = drop_in
        .and_then(|block| block.split_once('\n'))
        .expect("a drop-in and its place");
    assert!(
        place.ends_with(&format!("/{NAME}.d/backend.conf")),
        "{place}"
    );
    let said_of = |drop_in: &str| {
        let folder = tempfile::tempdir().expect("a folder");
        let parts = folder.path().join(format!("{NAME}.d"));
        fs::create_dir(&parts).expect("a folder");
        fs::write(folder.path().join(GUEST_UNIT), unit(GUEST_UNIT)).expect("room");
        fs::write(parts.join("backend.conf"), drop_in).expect("room");
        let mut command = Command::new("systemd-analyze");
        let verified = command.arg("verify").arg(folder.path().join(NAME)).output();
        verified.map(|run| String::from_utf8_lossy(&run.stderr).into_owned())
    };
    match said_of(drop_in) {
        Err(error) => println!("skipped: systemd-analyze cannot be started: {error}"),
        Ok(said) => {
            assert!(!said.contains("backend.conf"), "{said}");
            let wrong = said_of(&drop_in.replace("RestartSec", "RestartSek"));
            let said = wrong.expect("as before");
            assert!(
                said.contains("backend.conf:") && said.contains("'RestartSek'"),
                "{said}"
            );
        }
    }
}

/// Returns the command of a unit of the backend or guest `name`, whose file is in this folder.
pub fn unit_command(unit_name: &str, folder: &Path, name: &str) -> Vec<String> {
    let folder = folder.to_str().expect("a path in UTF-8");
    let unit = unit(unit_name).replace("/etc/wormhole", folder);
    let unit = unit.replace("%i", name);
    let line = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="));
    let words = line.expect("a command").split(' ');
    words.map(str::to_owned).collect()
}

/// Runs the command of a unit of the backend or guest `two`, whose file is in this folder.
fn start_unit(name: &str, folder: &Path) -> Finished {
    let words = unit_command(name, folder, "two");
    let words: Vec<&str> = words.iter().skip(1).map(String::as_str).collect();
    Runtime::new().finish(&words)
}

#[test]
fn the_units_of_backends_start_them() {
    let _alone = alone();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("two.toml");
    fs::write(&file, "device = \"cpu:2\"").expect("room");
    for name in UNITS {
        // Without a cgroup the supervisor refuses to start, unless its tenants trust each other.
        refused(&start_unit(name, folder.path()), "--trusted-tenants");
    }
    fs::write(&file, "sessions = 0").expect("room");
    refused(&start_unit(UNITS[1], folder.path()), "two.toml, line 1: ");
}

#[test]
fn the_unit_of_guests_starts_them_by_their_files() {
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir(folder.path().join("guests")).expect("a folder");
    fs::write(
        folder.path().join("guests/two.toml"),
        "kernel = \"/no/kernel\"",
    )
    .expect("room");
    let run = start_unit(GUEST_UNIT, folder.path());
    refused(&run, "cannot read /no/kernel");
}
