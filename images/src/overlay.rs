//! Builds overlays, which add the parts of a run to a machine's image: the first process, the program with its
//! libraries, the CUDA driver library of guests, and the run file.

mod backend;
mod script;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use wormhole_init::{
    COLLECT_BYTES, InterpreterFault, Network, PARTS, PARTS_BESIDE_FILES, RUN_FILE, RunFile, Sink,
    TerminalSize, User, Volume,
};

use crate::cpio::Archive;
use crate::emulated_host::HOST_COLLECT_BYTES;
use crate::error::{ImageError, io};
use crate::image::{Image, OF_ROOT};
use crate::libraries::{CACHE, Search, is_elf};

pub use self::backend::{BackendRun, backend_overlay};
pub use self::script::{HostScript, is_emulation_failure, script_host, script_overlay};

/// Ports of the host's vsock address to which a guest connects.
pub mod ports {
    /// Control streams of guest processes: each from its guest, and each from the backend VM that serves it.
    pub const CONTROL: u32 = 9000;
    /// Standard output of the program.
    pub const STDOUT: u32 = 9001;
    /// Standard error of the program.
    pub const STDERR: u32 = 9002;
    /// Final report, in the format of [`Report`](wormhole_init::Report).
    pub const REPORT: u32 = 9003;
    /// Signals for the program. The guest sends `!` when it is ready, then receives signal numbers of one byte each.
    pub const SIGNALS: u32 = 9004;
    /// Standard input of the program. The guest sends `!` when it is ready.
    pub const STDIN: u32 = 9005;
    /// The stream of a backend VM's tenant.
    pub const TENANT: u32 = 9006;
    /// The stream of the tenant of a backend VM's first slot. The streams of the other slots follow, in their order.
    pub const SLOT: u32 = 9100;
    /// Control streams of guest processes of the tenant of the first slot. The streams of the other slots follow.
    pub const SLOT_CONTROL: u32 = 9200;
}

/// I/O port to which a guest writes the exit status, one byte, just before it restarts.
pub const EXIT_PORT: u16 = 0xf4;

/// vsock context id of the host.
const HOST_CID: u32 = 2;

/// Folder of the real host's files in the emulated host.
pub const HOST_FILES: &str = "/host";

/// Returns the folder in the emulated host of the real host's files for a volume of a guest.
#[must_use]
pub fn volume_place(number: usize) -> PathBuf {
    Path::new("/volumes").join(number.to_string())
}

/// Library names that the guest libraries provide, regardless of an NVIDIA driver on this machine.
const FRONTEND_NAMES: [&str; 4] = [
    "libcuda.so.1",
    "libcuda.so",
    "libnvidia-ml.so.1",
    "libnvidia-ml.so",
];

/// Folders that are symbolic links into `/usr`, as on Debian.
const MERGED: [&str; 4] = ["bin", "sbin", "lib", "lib64"];

/// A run of one program in a guest.
#[derive(Clone, Debug)]
pub struct GuestRun {
    /// Path of `wormhole-init`.
    pub init: PathBuf,
    /// Paths of the guest's `libcuda.so.1` and `libnvidia-ml.so.1`; empty for a guest without CUDA.
    pub frontends: Vec<PathBuf>,
    /// Path of the program in the guest.
    pub program: PathBuf,
    /// Arguments of the program, from its name on.
    pub arguments: Vec<OsString>,
    /// Environment variables. They replace common ones.
    pub variables: Vec<(OsString, OsString)>,
    /// Whether standard input comes from outside the machine; it is empty otherwise.
    pub stdin: bool,
    /// Size of the program's terminal, if it has one.
    pub terminal: Option<TerminalSize>,
    /// Further virtio file systems, in their order.
    pub volumes: Vec<Volume>,
    /// Identity of the program.
    pub user: User,
    /// Name of the guest.
    pub hostname: String,
    /// Working directory of the program.
    pub directory: PathBuf,
    /// Size of the window in bytes; 0 for a guest without a window.
    pub window: u64,
    /// Networks of the guest's interfaces.
    pub networks: Vec<Network>,
    /// Files and folders to return with the report.
    pub collect: Vec<PathBuf>,
}

/// A run of `wormhole` in the emulated host.
#[derive(Clone, Debug)]
pub struct HostRun {
    /// Path of `wormhole-init`.
    pub init: PathBuf,
    /// Path of the `wormhole` command.
    pub wormhole: PathBuf,
    /// Paths of the other parts: supervisor, worker, the guest's libraries, `wormhole-init`.
    pub parts: Vec<PathBuf>,
    /// Images that `wormhole` boots: of a guest, and of its backend VM if it has one.
    pub images: Vec<Image>,
    /// Arguments of `wormhole`, without its name.
    pub arguments: Vec<OsString>,
    /// Environment variables. They replace common ones.
    pub variables: Vec<(OsString, OsString)>,
    /// Whether standard input comes from outside the machine; it is empty otherwise.
    pub stdin: bool,
    /// Size of the program's terminal, if it has one.
    pub terminal: Option<TerminalSize>,
    /// Files and folders to copy to the same paths in the machine; programs with their libraries.
    pub programs: Vec<PathBuf>,
    /// Whether the machine has a virtio file system, which is mounted at [`HOST_FILES`].
    pub has_files: bool,
    /// Further virtio file systems, by whether they are writable. They are mounted at the places of [`volume_place`].
    pub volumes: Vec<bool>,
    /// Number of tap interfaces for guests, each bridged with the machine's interface of its number.
    pub taps: usize,
    /// Files and folders to return with the report.
    pub collect: Vec<PathBuf>,
}

/// Builds the overlay of a guest, whose root is a virtio file system.
pub fn guest_overlay(run: &GuestRun) -> Result<Vec<u8>, ImageError> {
    let mut overlay = Overlay::new(&run.init, &run.variables)?;
    for frontend in &run.frontends {
        let name = frontend
            .file_name()
            .ok_or_else(|| ImageError::Path(frontend.clone()))?;
        let place = Path::new(PARTS).join(name);
        overlay.copy(frontend, &place)?;
        // Some programs open the library without its version, and would find the one of the host's driver.
        if let Some(short) = name.as_bytes().strip_suffix(b".1") {
            let link = place.with_file_name(OsStr::from_bytes(short));
            overlay.archive.link(&destination(&link)?, name.as_bytes());
        }
    }
    let mut variables = common_variables(&run.variables, PARTS_BESIDE_FILES);
    variables.push((
        "WORMHOLE_CONTROL".into(),
        format!("vsock:{HOST_CID}:{}", ports::CONTROL).into(),
    ));
    variables.extend(
        run.variables
            .iter()
            .filter(|(name, _)| name != "LD_LIBRARY_PATH")
            .cloned(),
    );
    let vsock = |port| Sink::Vsock {
        cid: HOST_CID,
        port,
    };
    overlay.finish(&RunFile {
        program: run.program.clone(),
        arguments: run.arguments.clone(),
        variables,
        user: run.user.clone(),
        hostname: Some(run.hostname.clone()),
        directory: run.directory.clone(),
        files: Some("/".into()),
        volumes: run.volumes.clone(),
        stdin: run.stdin.then(|| vsock(ports::STDIN)),
        stdout: vsock(ports::STDOUT),
        stderr: run.terminal.is_none().then(|| vsock(ports::STDERR)),
        terminal: run.terminal,
        report: vsock(ports::REPORT),
        signals: Some(vsock(ports::SIGNALS)),
        window: Some(run.window).filter(|&size| size > 0),
        windows: None,
        networks: run.networks.clone(),
        taps: 0,
        exit_port: Some(EXIT_PORT),
        collect: run.collect.clone(),
        collect_bytes: COLLECT_BYTES,
    })
}

/// A run of one program in a guest of another monitor, which no launcher attends. The output goes to the console.
#[derive(Clone, Debug)]
pub struct ConsoleRun {
    /// Path of `wormhole-init`.
    pub init: PathBuf,
    /// Paths of the guest's `libcuda.so.1` and `libnvidia-ml.so.1`.
    pub frontends: Vec<PathBuf>,
    /// Program, which is copied with its libraries, and its arguments.
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    /// Further files and folders to copy to the same paths in the guest, programs with their libraries.
    pub take: Vec<PathBuf>,
    /// Size of the window in bytes; 0 for a guest without a window.
    pub window: u64,
}

/// Builds the overlay of a guest of another monitor.
pub fn console_overlay(run: &ConsoleRun) -> Result<Vec<u8>, ImageError> {
    let mut overlay = Overlay::new(&run.init, &[])?;
    for frontend in &run.frontends {
        let name = frontend
            .file_name()
            .ok_or_else(|| ImageError::Path(frontend.clone()))?;
        overlay.executable_at(frontend, &Path::new(PARTS).join(name))?;
    }
    for path in [&run.program].into_iter().chain(&run.take) {
        overlay.take(path)?;
    }
    let mut variables = common_variables(&[], PARTS);
    let control = format!("vsock:{HOST_CID}:{}", ports::CONTROL);
    variables.push(("WORMHOLE_CONTROL".into(), control.into()));
    let mut run_file = RunFile::new(&run.program);
    run_file.arguments.extend(run.arguments.iter().cloned());
    overlay.finish(&RunFile {
        variables,
        window: Some(run.window).filter(|&size| size > 0),
        exit_port: Some(EXIT_PORT),
        ..run_file
    })
}

/// Builds the overlay of the emulated host.
pub fn host_overlay(run: &HostRun) -> Result<Vec<u8>, ImageError> {
    let mut overlay = Overlay::new(&run.init, &run.variables)?;
    let command = overlay.install(&run.wormhole, &run.parts)?;
    for path in &run.programs {
        overlay.take(path)?;
    }
    for image in &run.images {
        image.pack(&mut overlay.archive, OF_ROOT.trim_start_matches('/'))?;
    }
    let mut variables = common_variables(&run.variables, PARTS);
    variables.push(("WORMHOLE_IMAGES".into(), OF_ROOT.into()));
    variables.extend(
        run.variables
            .iter()
            .filter(|(name, _)| name != "LD_LIBRARY_PATH")
            .cloned(),
    );
    let arguments = std::iter::once(command.as_os_str().to_owned())
        .chain(run.arguments.iter().cloned())
        .collect();
    overlay.finish(&RunFile {
        arguments,
        variables,
        files: run.has_files.then(|| HOST_FILES.into()),
        volumes: run
            .volumes
            .iter()
            .enumerate()
            .map(|(number, &is_writable)| Volume {
                place: volume_place(number),
                is_writable,
            })
            .collect(),
        stdin: run.stdin.then(|| Sink::Device("/dev/vport0p5".into())),
        stdout: Sink::Device("/dev/vport0p1".into()),
        // Errors stay apart from the terminal, since the command's caller reads them.
        stderr: Some(Sink::Device("/dev/vport0p2".into())),
        terminal: run.terminal,
        report: Sink::Device("/dev/vport0p3".into()),
        signals: Some(Sink::Device("/dev/vport0p4".into())),
        taps: run.taps,
        collect: run.collect.clone(),
        collect_bytes: HOST_COLLECT_BYTES,
        ..RunFile::new(command)
    })
}

/// Returns the environment variables of every program that it does not have of its own. In LD_LIBRARY_PATH, Wormhole's
/// libraries, in the folder `parts`, precede the program's folders.
fn common_variables(own: &[(OsString, OsString)], parts: &str) -> Vec<(OsString, OsString)> {
    let mut library_path = OsString::from(parts);
    if let Some(path) = value(own, "LD_LIBRARY_PATH") {
        library_path.push(":");
        library_path.push(path);
    }
    let path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin";
    let usual = [("PATH", path), ("HOME", "/root")];
    let usual = usual
        .into_iter()
        .filter(|(name, _)| !own.iter().any(|(known, _)| known == name));
    usual
        .map(|(name, value)| (name.into(), value.into()))
        .chain([("LD_LIBRARY_PATH".into(), library_path)])
        .collect()
}

fn value<'a>(variables: &'a [(OsString, OsString)], name: &str) -> Option<&'a OsStr> {
    variables
        .iter()
        .rev()
        .find(|(known, value)| known == name && !value.is_empty())
        .map(|(_, value)| value.as_os_str())
}

/// An overlay under construction.
#[derive(Debug)]
struct Overlay {
    archive: Archive,
    search: Search,
}

impl Overlay {
    fn new(init: &Path, variables: &[(OsString, OsString)]) -> Result<Self, ImageError> {
        let library_path =
            value(variables, "LD_LIBRARY_PATH").map(|path| std::env::split_paths(path).collect());
        let mut search = Search::of_this_machine(library_path.unwrap_or_default());
        search.provided = BTreeSet::from(FRONTEND_NAMES.map(str::to_owned));

        let mut archive = Archive::new();
        for name in MERGED {
            archive.link(name, format!("usr/{name}"));
            archive.folder(format!("usr/{name}"));
        }
        // The kernel opens the console before any file system is mounted.
        archive.character_device("dev/console", 0o600, 5, 1);
        archive.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
        archive.file("etc/group", 0o644, b"root:x:0:\n")?;
        archive.file("etc/hosts", 0o644, b"127.0.0.1 localhost\n")?;
        let mut overlay = Self { archive, search };
        let data = fs::read(init).map_err(io("read", init))?;
        overlay.archive.file("init", 0o755, &data)?;
        // The loader needs its cache to find libraries in the folders of ld.so.conf.
        if let Ok(cache) = fs::read(CACHE) {
            overlay
                .archive
                .file(CACHE.trim_start_matches('/'), 0o644, &cache)?;
        }
        Ok(overlay)
    }

    fn finish(mut self, run: &RunFile) -> Result<Vec<u8>, ImageError> {
        // Added last: a folder that is a symbolic link on this machine may already be in the overlay as a link.
        for name in ["proc", "sys", "dev", "tmp", "run", "root", "var", "etc"] {
            self.archive.folder(name);
        }
        self.archive
            .file(RUN_FILE.trim_start_matches('/'), 0o644, &run.to_bytes())?;
        Ok(self.archive.finish())
    }

    /// Adds the `wormhole` command and its parts, all with their libraries. Returns the command's place.
    fn install(&mut self, wormhole: &Path, parts: &[PathBuf]) -> Result<&'static Path, ImageError> {
        let command = Path::new("/usr/bin/wormhole");
        self.executable_at(wormhole, command)?;
        for part in parts {
            let name = part
                .file_name()
                .ok_or_else(|| ImageError::Path(part.clone()))?;
            self.executable_at(part, &Path::new(PARTS).join(name))?;
        }
        Ok(command)
    }

    /// Adds a file or folder at its own path; programs with their libraries or interpreters.
    fn take(&mut self, path: &Path) -> Result<(), ImageError> {
        let path = std::path::absolute(path).map_err(io("find", path))?;
        let path = self.follow(&path)?;
        if !path.is_dir() {
            return self.executable_at(&path, &path);
        }
        let mut folders = vec![path];
        while let Some(folder) = folders.pop() {
            self.archive.folder(&destination(&folder)?);
            for entry in fs::read_dir(&folder).map_err(io("list", &folder))? {
                let path = entry.map_err(io("list", &folder))?.path();
                let kind = fs::symlink_metadata(&path)
                    .map_err(io("read", &path))?
                    .file_type();
                if kind.is_dir() {
                    folders.push(path);
                } else if kind.is_symlink() {
                    let target = fs::read_link(&path).map_err(io("read", &path))?;
                    self.archive
                        .link(&destination(&path)?, target.as_os_str().as_bytes());
                } else if kind.is_file() {
                    match self.executable_at(&path, &path) {
                        // A folder may contain files that are never run.
                        Err(ImageError::MissingLibrary { .. } | ImageError::Elf { .. }) => {}
                        other => other?,
                    }
                }
            }
        }
        Ok(())
    }

    /// Resolves the symbolic links of an absolute path and adds them to the overlay. The program's real path thus is
    /// the same
    /// in the guest, where the loader searches libraries relative to it (`$ORIGIN`, ld.so(8)).
    fn follow(&mut self, path: &Path) -> Result<PathBuf, ImageError> {
        let mut real = PathBuf::new();
        for component in path.components() {
            match component {
                Component::ParentDir => drop(real.pop()),
                other => real.push(other),
            }
            if real.is_symlink() {
                let target = fs::canonicalize(&real).map_err(io("find", &real))?;
                let place = destination(&real)?;
                self.archive.link(&place, target.as_os_str().as_bytes());
                real = target;
            }
        }
        Ok(real)
    }

    /// Adds the file `source` at `place`, with its libraries if it is a program and its interpreter if it is a script.
    fn executable_at(&mut self, source: &Path, place: &Path) -> Result<(), ImageError> {
        let name = destination(place)?;
        if self.archive.contains(&name) {
            return Ok(());
        }
        let data = fs::read(source).map_err(io("read", source))?;
        let mode = fs::metadata(source)
            .map_err(io("read", source))?
            .permissions()
            .mode();
        self.archive.file(&name, mode & 0o777, &data)?;
        if is_elf(&data) {
            for library in self.search.libraries(source)? {
                self.library(&library)?;
            }
        } else if let Some(interpreter) = interpreter(&data) {
            if let Some(fault) = InterpreterFault::of(&interpreter) {
                return Err(ImageError::Interpreter {
                    script: source.to_owned(),
                    interpreter,
                    fault,
                });
            }
            self.take(&interpreter)?;
        }
        Ok(())
    }

    /// Adds the file `source` at `place`, without its libraries.
    fn copy(&mut self, source: &Path, place: &Path) -> Result<(), ImageError> {
        let data = fs::read(source).map_err(io("read", source))?;
        self.archive.file(&destination(place)?, 0o755, &data)
    }

    /// Adds this machine's libraries of these names, with those that they need.
    fn libraries(&mut self, names: &[String]) -> Result<(), ImageError> {
        for name in names {
            let found = self.search.named(name);
            let found = found.ok_or_else(|| ImageError::MissingLibrary {
                name: name.clone(),
                needed_by: "libcuda.so.1".into(),
            })?;
            self.library(&found)?;
            for library in self.search.libraries(&found)? {
                self.library(&library)?;
            }
        }
        Ok(())
    }

    fn library(&mut self, path: &Path) -> Result<(), ImageError> {
        let path = &self.follow(path)?;
        let name = destination(path)?;
        if self.archive.contains(&name) {
            return Ok(());
        }
        let data = fs::read(path).map_err(io("read", path))?;
        self.archive.file(&name, 0o755, &data)
    }
}

/// Returns the interpreter in a script's first line.
fn interpreter(data: &[u8]) -> Option<PathBuf> {
    let line = data
        .strip_prefix(b"#!")?
        .split(|&byte| byte == b'\n')
        .next()?;
    let mut words = line
        .split(|byte| byte.is_ascii_whitespace())
        .filter(|word| !word.is_empty());
    words.next().map(|word| OsStr::from_bytes(word).into())
}

/// Returns a path's name in an archive: relative to the root, without `..`, and with the merged folders below `usr`.
fn destination(path: &Path) -> Result<Vec<u8>, ImageError> {
    let mut parts: Vec<&[u8]> = Vec::new();
    if !path.is_absolute() {
        return Err(ImageError::Path(path.to_owned()));
    }
    for component in path.components() {
        match component {
            Component::Normal(part) => parts.push(part.as_bytes()),
            Component::ParentDir => drop(parts.pop()),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => {}
        }
    }
    let merged = |first: &&[u8]| MERGED.iter().any(|name| name.as_bytes() == *first);
    if parts.first().is_some_and(merged) {
        parts.insert(0, b"usr");
    }
    Ok(parts.join(&b'/'))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;
    use crate::libraries::tests::compile;

    fn run() -> GuestRun {
        GuestRun {
            stdin: false,
            terminal: None,
            init: "/bin/true".into(),
            frontends: vec!["/bin/false".into()],
            program: "/no/such/program".into(),
            arguments: vec!["name".into(), OsString::from_vec(b"\xff\xfe".to_vec())],
            variables: vec![
                ("LD_LIBRARY_PATH".into(), "/opt/mine".into()),
                ("A".into(), "b".into()),
            ],
            volumes: Vec::new(),
            user: User::default(),
            hostname: "guest".to_owned(),
            directory: "/work".into(),
            window: 0,
            networks: Vec::new(),
            collect: vec!["/tmp/results".into()],
        }
    }

    /// Builds an overlay with one file or folder of this machine.
    fn with(path: &Path) -> Result<Vec<u8>, ImageError> {
        let mut overlay = Overlay::new("/bin/true".as_ref(), &[])?;
        overlay.take(path)?;
        overlay.finish(&RunFile::new("/bin/true"))
    }

    fn contains(overlay: &[u8], text: &str) -> bool {
        overlay
            .windows(text.len())
            .any(|window| window == text.as_bytes())
    }

    fn holds(overlay: &[u8], bytes: &[u8]) -> bool {
        overlay.windows(bytes.len()).any(|window| window == bytes)
    }

    #[test]
    fn a_machine_gets_a_program_and_its_loader() {
        let overlay = with("/bin/sh".as_ref()).expect("every machine has a shell");
        for text in [
            "usr/bin/sh\0",
            "libc.so.6\0",
            "usr/lib64/ld-linux-x86-64.so.2\0",
        ] {
            assert!(contains(&overlay, text), "{text:?}");
        }
        assert_eq!(overlay, with("/bin/sh".as_ref()).expect("as before"));
    }

    #[test]
    fn a_guest_gets_its_run_file_and_the_frontends_alone() {
        let mut run = run();
        let overlay = guest_overlay(&run).expect("it reads the frontend");
        for bytes in [
            &b"usr/lib/wormhole/false\0"[..],
            b"program /no/such/program\nargument name\nargument \xff\xfe\n",
            b"files /\n",
            b"variable LD_LIBRARY_PATH=/run/wormhole:/opt/mine\n",
            b"variable PATH=/usr/local/bin:",
            b"variable A=b\n",
            b"directory /work\n",
            b"stdout vsock 2 9001\n",
        ] {
            assert!(holds(&overlay, bytes), "{}", bytes.escape_ascii());
        }
        run.variables.push(("PATH".into(), "/mine".into()));
        let overlay = guest_overlay(&run).expect("as before");
        assert!(contains(&overlay, "variable PATH=/mine\n"));
        for text in ["usr/lib64/ld-linux-x86-64.so.2\0", "variable PATH=/usr"] {
            assert!(!contains(&overlay, text), "{text:?}");
        }
    }

    #[test]
    fn a_script_brings_its_interpreter_and_names_a_missing_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let script = folder.path().join("script");
        fs::write(&script, "#! /bin/sh -e\nexit 0\n").expect("it is written");
        let overlay = with(&script).expect("the shell is there");
        assert!(contains(&overlay, "usr/bin/sh\0"));
        fs::write(&script, "#!/nowhere/shell\n").expect("it is written");
        let error = with(&script).expect_err("there is no such shell");
        assert!(error.to_string().contains("/nowhere/shell"), "{error}");
    }

    #[test]
    fn names_are_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        let odd = folder.path().join(OsStr::from_bytes(b"odd\xff"));
        fs::write(&odd, "some data of mine").expect("it is written");
        let overlay = with(&odd).expect("all is there");
        assert!(holds(&overlay, b"/odd\xff\0"));
    }

    #[test]
    fn a_folder_is_taken_whole() {
        let folder = tempfile::tempdir().expect("a folder");
        fs::create_dir(folder.path().join("deep")).expect("a folder");
        fs::write(folder.path().join("deep/data"), "some data of mine").expect("it is written");
        std::os::unix::fs::symlink("deep/data", folder.path().join("link")).expect("a link");
        let overlay = with(folder.path()).expect("all is there");
        let name = folder.path().display().to_string();
        let name = name.trim_start_matches('/');
        assert!(contains(&overlay, &format!("{name}/deep/data\0")));
        assert!(contains(&overlay, &format!("{name}/link\0")));
        assert!(contains(&overlay, "some data of mine"));
    }

    #[test]
    fn links_stay_links_and_libraries_beside_the_real_program_come_along() {
        let place = tempfile::tempdir().expect("a folder");
        let real = place.path().join("real");
        fs::create_dir(&real).expect("a folder");
        compile(&real, "libown.so", true, &[]);
        compile(
            &real,
            "program",
            false,
            &["-lown", "-Wl,-rpath,$ORIGIN/../real"],
        );
        let link = place.path().join("link");
        std::os::unix::fs::symlink("real", &link).expect("a link");
        let overlay = with(&link.join("program")).expect("all is there");
        let name = |path: &Path| path.display().to_string()[1..].to_owned() + "\0";
        for file in ["program", "libown.so"] {
            assert!(contains(&overlay, &name(&real.join(file))), "{file}");
        }
        assert!(!contains(&overlay, &name(&link.join("program"))));
        assert!(contains(&overlay, &name(&link)));
    }

    #[test]
    fn paths_keep_inside_the_root_and_in_the_merged_folders() {
        assert_eq!(
            destination("/lib64/../lib/./x.so".as_ref()).expect("absolute"),
            b"usr/lib/x.so"
        );
        assert_eq!(
            destination("/../../etc/x".as_ref()).expect("absolute"),
            b"etc/x"
        );
        assert_eq!(
            destination("/library/x".as_ref()).expect("absolute"),
            b"library/x"
        );
        assert!(matches!(
            destination("x".as_ref()),
            Err(ImageError::Path(_))
        ));
    }
}
