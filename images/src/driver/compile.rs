//! Compiles the driver's kernel modules with Debian's compiler, in a root of its packages.
//!
//! Commands of the driver's Makefile are strangers' code. Root starts them as nobody, without any capability and without a way
//! to regain one, in namespaces of their own, without a network, below a folder with the packages and the modules' sources.
//! These cannot leave that folder. In a namespace of users an ordinary user's commands could, since they are root there, so
//! that such a user cannot build a driver.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::parts::{Parts, is_file};
use super::space::{MOST_SPACE, is_within};
use super::{DriverError, Surroundings};
use crate::debian::Archive;
use crate::error::{ImageError, io};

/// Packages of the compiler beside the kernel's headers, which name the kernel's own compiler.
const PACKAGES: [&str; 9] = [
    "coreutils",
    "dash",
    "diffutils",
    "findutils",
    "gcc",
    "grep",
    "make",
    "mawk",
    "sed",
];
/// Folders of the root that Debian's installed systems have as links into `/usr`.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];
/// Links that Debian's packages make when they are installed, and their targets.
const LINKS: [(&str, &str); 2] = [("usr/bin/awk", "mawk"), ("bin/sh", "dash")];
/// Folder of the sources in the root, and the other one that the commands can write.
const SOURCES: &str = "build";
const TEMPORARY: &str = "tmp";
/// Modules of the driver that are built, and their files. Those for screens are left out.
const BUILT: [(&str, &str); 2] = [("nvidia", "nvidia.ko"), ("nvidia_uvm", "nvidia-uvm.ko")];
const LEFT_OUT: &str = "nvidia-modeset nvidia-drm nvidia-peermem";
/// User and group of the commands: nobody.
const NOBODY: u32 = 65534;
/// Folders of this machine's tools. An ordinary user's PATH lacks some of these folders.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";
/// Makes the null device of the root, and runs a command there for a number of seconds. The shell waits for it: the signal
/// that ends the shell with its parent would be lost if its own user changed.
const ENTER: &str = "mount --bind /dev/null dev/null || exit; timeout --signal=KILL \"$@\"; status=$?; exit \"$status\"";
/// Rights that entering the root and changing the user need. The commands have none of them, and cannot regain one.
const RIGHTS: &str = "--bounding-set=-all,+sys_chroot,+setuid,+setgid";
/// Operation of `keyctl` (`linux/keyctl.h`).
const JOIN_SESSION_KEYRING: libc::c_long = 1;
/// Time that the commands have.
const DEADLINE: Duration = Duration::from_secs(30 * 60);
/// Most bytes of a file that the commands write, their log among them, and of a module that is taken.
const MOST_WRITTEN: u64 = 512 << 20;
const MOST_TAKEN: u64 = 256 << 20;
/// Interval of looks at the commands, and of looks at the space.
const LOOK: Duration = Duration::from_millis(50);
const LOOKS: u32 = 10;
/// Most processes of that user on this machine, and most memory of each.
const PROCESSES: u32 = 4096;
const MEMORY: u64 = 8 << 30;
/// Compiles, and removes what is for debuggers.
const COMPILE: &str = "make \"$@\" modules && strip --strip-debug nvidia.ko nvidia-uvm.ko";
/// Lines of the compiler that are shown if it fails, and bytes at the end of its log among which they are.
const SHOWN: usize = 8;
const SHOWN_BYTES: u64 = 1 << 20;
/// Parts of lines that name an error.
const ERRORS: [&str; 3] = [": error: ", ": not found", "*** ["];

/// Compiles the modules, whose sources move away. Returns their names and files.
pub(super) fn modules(
    parts: &Parts,
    surroundings: &Surroundings<'_>,
) -> Result<Vec<(&'static str, PathBuf)>, ImageError> {
    let &Surroundings {
        release,
        scratch,
        log,
        progress,
        ..
    } = surroundings;
    let root = root(surroundings)?;
    let sources = root.join(SOURCES);
    fs::rename(&parts.sources, &sources).map_err(io("move", &parts.sources))?;
    give_away(&sources).map_err(io("give away", &sources))?;
    progress(&format!(
        "building the modules of driver {} for kernel {release}, which takes minutes",
        parts.version
    ));
    let output = scratch.join("log");
    let log_file = File::create(&output).map_err(io("write", &output))?;
    let both = log_file.try_clone().map_err(io("write", &output))?;
    let mut command = confined(DEADLINE, &make(release));
    command
        .current_dir(&root)
        .stdin(Stdio::null())
        .stdout(log_file)
        .stderr(both);
    let start = Instant::now();
    let mut child = command.spawn().map_err(not_started)?;
    let Some(status) = watched(&mut child, &root, MOST_SPACE).map_err(io("watch", &root))? else {
        return Err(DriverError::TakesSpace {
            version: parts.version.clone(),
            folder: root,
        }
        .into());
    };
    let built = BUILT.map(|(name, file)| (name, sources.join(file)));
    if status.success() && built.iter().all(|(_, path)| is_file(path)) {
        for (_, path) in &built {
            check_size(path)?;
        }
        return Ok(built.into());
    }
    if start.elapsed() >= DEADLINE {
        let version = parts.version.clone();
        return Err(DriverError::Late {
            version,
            after: DEADLINE,
        }
        .into());
    }
    for line in telling_lines(&output).map_err(io("read", &output))? {
        progress(&line);
    }
    fs::rename(&output, log).map_err(io("write", log))?;
    Err(DriverError::Compile {
        version: parts.version.clone(),
        release: release.to_owned(),
        log: log.to_owned(),
    }
    .into())
}

/// Makes the root, a folder with the compiler and the kernel's headers.
fn root(surroundings: &Surroundings<'_>) -> Result<PathBuf, ImageError> {
    let place = surroundings.scratch.join("compiler");
    fs::create_dir(&place).map_err(io("make", &place))?;
    (surroundings.progress)("fetching Debian's compiler and the headers of the kernel");
    let archive = Archive::of(&place, &surroundings.kernel.suite().sources())?;
    let headers = format!("linux-headers-{}", surroundings.release);
    let packages: Vec<&str> = PACKAGES.into_iter().chain([headers.as_str()]).collect();
    let root = place.join("root");
    fs::create_dir(&root).map_err(io("make", &root))?;
    for package in archive.download_with_dependencies(&packages)? {
        archive.extract(&package, &root)?;
    }
    prepare(&root).map_err(io("prepare", &root))?;
    Ok(root)
}

/// Makes what installing the packages would have made.
fn prepare(root: &Path) -> io::Result<()> {
    fs::set_permissions(root, Permissions::from_mode(0o755))?;
    for name in MERGED {
        let place = root.join(name);
        if fs::symlink_metadata(&place).is_err() {
            symlink(Path::new("usr").join(name), place)?;
        }
    }
    for (name, target) in LINKS {
        let place = root.join(name);
        if fs::symlink_metadata(&place).is_err() {
            symlink(target, place)?;
        }
    }
    fs::create_dir_all(root.join("dev"))?;
    fs::write(root.join("dev/null"), "")?;
    fs::create_dir_all(root.join(TEMPORARY))?;
    fs::set_permissions(root.join(TEMPORARY), Permissions::from_mode(0o1777))
}

/// Gives a folder and all in it to nobody.
fn give_away(folder: &Path) -> io::Result<()> {
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        chown(&folder, Some(NOBODY), Some(NOBODY))?;
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            match entry.file_type()?.is_dir() {
                true => folders.push(entry.path()),
                // There are no links among them.
                false => chown(entry.path(), Some(NOBODY), Some(NOBODY))?,
            }
        }
    }
    Ok(())
}

/// Returns the command that compiles, in the root.
fn make(release: &str) -> Vec<String> {
    let (version, _) = release.split_once("-cloud").unwrap_or((release, ""));
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let script = format!("cd /{SOURCES} && {COMPILE}");
    let mut words = ["sh", "-c", &script, "sh"].map(str::to_owned).to_vec();
    words.extend([
        format!("--jobs={processors}"),
        format!("SYSSRC=/usr/src/linux-headers-{version}-common"),
        format!("SYSOUT=/usr/src/linux-headers-{release}"),
        format!("KERNEL_UNAME={release}"),
        format!("NV_EXCLUDE_KERNEL_MODULES={LEFT_OUT}"),
    ]);
    words
}

/// Returns the command that runs words as nobody with the command's folder as root. It ends with the thread that starts it,
/// and no process of it outlives it. It has a session keyring of its own: a process can use the keys of its session's keyring
/// whatever its user is.
fn confined(deadline: Duration, words: &[String]) -> Command {
    let mut command = Command::new("setpriv");
    command
        .env_clear()
        .env("PATH", PATH)
        // No limit bounds the memory of all of them: the kernel kills them before the workers of a backend.
        .args(["--pdeathsig=KILL", "--", "choom", "--adjust=1000", "--"])
        .args(["prlimit", "--core=0"])
        .arg(format!("--fsize={MOST_WRITTEN}"))
        .arg(format!("--as={MEMORY}"))
        .arg(format!("--nproc={PROCESSES}"))
        .arg(format!("--cpu={}", deadline.as_secs()))
        .args(["--", "unshare", "--mount", "--net", "--pid", "--ipc"])
        .args(["--fork", "--kill-child", "--", "sh", "-c", ENTER, "sh"])
        .arg(deadline.as_secs().to_string())
        .args(["setpriv", "--no-new-privs", "--inh-caps=-all", RIGHTS])
        .args(["--", "chroot"])
        .arg(format!("--userspec={NOBODY}:{NOBODY}"))
        .arg("--groups=")
        .args([".", "/usr/bin/env", "-i"])
        .arg(format!("PATH={PATH}"))
        .args(["HOME=/tmp", "LC_ALL=C"])
        .args(words);
    // SAFETY: the closure makes one system call, which is safe between fork and exec and is given no memory.
    unsafe {
        command.pre_exec(|| {
            let no_name: libc::c_long = 0;
            if libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, no_name) >= 0 {
                return Ok(());
            }
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                // The commands have no keys either: the kernel has none, or a filter refuses the call to all of them.
                Some(libc::ENOSYS | libc::EPERM) => Ok(()),
                _ => Err(error),
            }
        });
    }
    command
}

/// Refuses a machine on which the commands cannot be confined.
pub(super) fn check_machine() -> Result<(), ImageError> {
    let mut command = confined(DEADLINE, &["true".to_owned()]);
    command.current_dir("/").stdin(Stdio::null());
    let output = command.output().map_err(not_started)?;
    Ok(check_output(&output)?)
}

fn check_output(output: &Output) -> Result<(), DriverError> {
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty());
    Err(DriverError::NoNamespaces(match last {
        Some(line) => line.trim().to_owned(),
        None => output.status.to_string(),
    }))
}

/// Waits until the commands end. Ends them and returns `None` if they take too much space.
fn watched(child: &mut Child, root: &Path, most: u64) -> io::Result<Option<ExitStatus>> {
    // Files without a name are found by the free space alone.
    let writable = [SOURCES, TEMPORARY].map(|name| root.join(name));
    let mut looks = 0u32;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        looks += 1;
        if looks.is_multiple_of(LOOKS) {
            let within = is_within(&writable, most);
            if !matches!(within, Ok(true)) {
                child.kill()?;
                child.wait()?;
                return within.map(|_| None);
            }
        }
        thread::sleep(LOOK);
    }
}

fn not_started(source: io::Error) -> ImageError {
    match source.kind() {
        io::ErrorKind::NotFound => ImageError::NoTool {
            program: "setpriv",
            package: "util-linux",
        },
        _ => ImageError::Start {
            program: "setpriv",
            source,
        },
    }
}

/// Refuses a module before it is read into memory.
fn check_size(path: &Path) -> Result<(), ImageError> {
    let bytes = fs::symlink_metadata(path).map_err(io("read", path))?.len();
    if bytes > MOST_TAKEN {
        let path = path.to_owned();
        return Err(DriverError::LargeModule {
            path,
            most: MOST_TAKEN,
        }
        .into());
    }
    Ok(())
}

/// Returns the first lines of a log that name an error, or else its last lines.
fn telling_lines(log: &Path) -> io::Result<Vec<String>> {
    let mut file = File::open(log)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(SHOWN_BYTES)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    let is_error = |line: &&&str| ERRORS.iter().any(|part| line.contains(part));
    let errors: Vec<String> = lines
        .iter()
        .filter(is_error)
        .map(|line| (*line).to_owned())
        .take(SHOWN)
        .collect();
    if !errors.is_empty() {
        return Ok(errors);
    }
    let last = lines.iter().rev().take(SHOWN).rev();
    Ok(last.map(|line| (*line).to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_shown_before_the_last_lines() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = folder.path().join("log");
        let shown = |text: &str| {
            fs::write(&log, text).expect("room");
            telling_lines(&log).expect("it is read")
        };
        let steps: String = (0..20)
            .map(|step| format!("CC {step} -Werror\n\n"))
            .collect();
        let last = shown(&steps);
        assert_eq!((last.len(), last[7].as_str()), (SHOWN, "CC 19 -Werror"));
        let error = "nv.c:1:2: error: too few arguments";
        let failed = format!("{steps}{error}\nmake[1]: *** [nv.o] Error 1\n{steps}");
        assert_eq!(shown(&failed), [error, "make[1]: *** [nv.o] Error 1"]);
        assert!(shown("").is_empty());
    }

    #[test]
    fn the_root_has_what_installed_packages_have_and_keeps_what_is_there() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        fs::create_dir_all(root.join("usr/bin")).expect("a folder");
        fs::create_dir_all(root.join("bin")).expect("a folder");
        fs::write(root.join("bin/sh"), "of a package").expect("room");
        prepare(root).expect("room");
        let link = |name: &str| fs::read_link(root.join(name)).ok();
        assert_eq!(link("lib"), Some("usr/lib".into()));
        assert_eq!(link("usr/bin/awk"), Some("mawk".into()));
        assert_eq!((link("bin"), link("bin/sh")), (None, None));
        assert!(root.join("dev/null").is_file());
    }

    /// Runs a script confined, with this machine's files; `None` where root cannot make namespaces.
    fn run(deadline: Duration, script: &str) -> Option<Output> {
        let run = |script: &str| {
            let words = ["sh", "-c", script].map(str::to_owned);
            let mut command = confined(deadline, &words);
            command.current_dir("/").stdin(Stdio::null());
            command.output().expect("it starts")
        };
        let is_able = rustix::process::geteuid().is_root() && run("true").status.success();
        is_able.then(|| run(script))
    }

    #[test]
    fn commands_of_a_makefile_have_no_rights_no_network_and_an_end() {
        let patient = Duration::from_secs(60);
        let Some(output) = run(
            patient,
            "cat /proc/self/status /proc/self/net/dev; echo $$; env",
        ) else {
            return;
        };
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        for line in [
            "Uid:\t65534\t65534\t65534\t65534",
            "Gid:\t65534\t65534\t65534\t65534",
            "Groups:\t ",
            "NoNewPrivs:\t1",
            "CapInh:\t0000000000000000",
            "CapPrm:\t0000000000000000",
            "CapEff:\t0000000000000000",
            "CapAmb:\t0000000000000000",
            "CapBnd:\t00000000000400c0",
            &format!("PATH={PATH}"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        let networks = text
            .lines()
            .filter(|line| line.contains(": ") && line.contains(" 0 "));
        assert!(
            networks.clone().all(|line| line.trim().starts_with("lo:")),
            "{text}"
        );
        // Keys are listed of the session's keyring and of users' own.
        let output = run(patient, "cat /proc/keys").expect("as before");
        let text = String::from_utf8_lossy(&output.stdout);
        let keyrings = text.lines().filter(|line| line.contains(" keyring   _ses"));
        let keyrings: Vec<_> = keyrings.collect();
        let is_new = matches!(keyrings[..], [own] if own.ends_with(" _ses: empty"));
        assert!(is_new || !output.status.success(), "{text}");
        // A right to enter another root would lead out of this one.
        let output = run(patient, "chroot / true").expect("as before");
        assert!(!output.status.success(), "{output:?}");
        let output = run(
            patient,
            "head -c 600M /dev/zero >/tmp/too-large; status=$?; rm /tmp/too-large; exit $status",
        );
        assert!(!output.expect("as before").status.success());
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let output = run(second, "sleep 120 & sleep 120").expect("as before");
        assert!(
            !output.status.success() && start.elapsed() >= second,
            "{output:?}"
        );
        assert!(start.elapsed() < patient);
    }

    #[test]
    fn commands_end_when_the_build_is_killed() {
        if run(Duration::from_secs(60), "true").is_none() {
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).expect("it is ours");
        let beat = folder.path().join("beat");
        let script = format!("while :; do echo >>{}; sleep 0.05; done", beat.display());
        let words = ["sh", "-c", &script].map(str::to_owned);
        let mut command = confined(Duration::from_secs(60), &words);
        let mut child = command.current_dir("/").spawn().expect("it starts");
        let beats = || fs::metadata(&beat).map_or(0, |data| data.len());
        let start = Instant::now();
        while beats() == 0 && start.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(20));
        }
        assert!(beats() > 0);
        child.kill().expect("it runs");
        child.wait().expect("it ran");
        thread::sleep(Duration::from_millis(500));
        let last = beats();
        thread::sleep(Duration::from_millis(500));
        assert_eq!(beats(), last);
        // The command itself ends with the thread that started it.
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let starter = thread::spawn(move || {
            let child = command.spawn().expect("it starts");
            let _ = ended.recv();
            child
        });
        let start = Instant::now();
        while beats() == last && start.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(20));
        }
        drop(end);
        let start = Instant::now();
        let mut child = starter.join().expect("it ended");
        let status = child.wait().expect("it ran");
        assert!(start.elapsed() < Duration::from_secs(20));
        assert!(!status.success(), "{status}");
    }

    #[test]
    fn commands_end_that_take_more_space_than_a_build() {
        if run(Duration::from_secs(60), "true").is_none() {
            return;
        }
        let root = tempfile::tempdir().expect("a folder");
        let all = Permissions::from_mode(0o777);
        fs::set_permissions(root.path(), all.clone()).expect("it is ours");
        for name in [SOURCES, TEMPORARY] {
            let place = root.path().join(name);
            fs::create_dir(&place).expect("a folder");
            fs::set_permissions(place, all.clone()).expect("it is ours");
        }
        let place = root.path().display();
        let status = |script: &str| {
            let words = ["sh", "-c", script].map(str::to_owned);
            let mut command = confined(Duration::from_secs(120), &words);
            let mut child = command.current_dir("/").spawn().expect("it starts");
            let start = Instant::now();
            let status = watched(&mut child, root.path(), 10 << 20).expect("it is watched");
            assert!(start.elapsed() < Duration::from_secs(60), "{script}");
            status
        };
        let some = format!("head -c 5M /dev/zero >{place}/build/some; sleep 1; exit 3");
        assert_eq!(status(&some).and_then(|status| status.code()), Some(3));
        let much = format!("head -c 6M /dev/zero >{place}/tmp/more; sleep 120");
        assert_eq!(status(&much), None);
        let deep = "i=0; while [ $i -lt 100 ]; do mkdir d && cd d; i=$((i+1)); done; sleep 120";
        let deep = format!("rm {place}/tmp/more; cd {place}/build; {deep}");
        assert_eq!(status(&deep), None);
    }

    #[test]
    fn a_machine_on_which_nothing_can_be_confined_is_told_why() {
        if run(Duration::from_secs(60), "true").is_none() {
            return;
        }
        check_machine().expect("it can");
        // As in a container.
        let confined = confined(DEADLINE, &["true".to_owned()]);
        let mut command = Command::new("setpriv");
        command
            .arg("--bounding-set=-sys_admin")
            .arg(confined.get_program())
            .args(confined.get_args())
            .current_dir("/");
        let output = command.output().expect("it starts");
        let error = check_output(&output)
            .expect_err("it has no right to")
            .to_string();
        assert!(
            error.contains("unshare failed: Operation not permitted"),
            "{error}"
        );
        assert_eq!(error.lines().count(), 1, "{error}");
    }

    #[test]
    fn a_module_that_is_too_large_is_refused_before_it_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("nvidia.ko");
        let file = File::create(&path).expect("a file");
        file.set_len(MOST_TAKEN).expect("it is sparse");
        check_size(&path).expect("it is small enough");
        file.set_len(1 << 40).expect("it is sparse");
        let error = check_size(&path).expect_err("it is too large").to_string();
        assert!(error.contains("more than 256 MiB"), "{error}");
    }
}
