//! A cgroup that is delegated to a test, as systemd delegates one to a supervisor.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{XattrFlags, setxattr};

/// Controllers without which a supervisor serves no strangers.
const CONTROLLERS: [&str; 3] = ["memory", "pids", "cpu"];

/// A cgroup at the top of the hierarchy. Removed on drop: end the processes in it before.
pub struct Delegated(PathBuf);

impl Delegated {
    /// Makes and marks it.
    ///
    /// # Errors
    /// The reason why this system has none.
    pub fn new() -> Result<Self, String> {
        let top = hierarchy()?;
        let failed = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
        let there = fs::read_to_string(top.join("cgroup.controllers"));
        let there = there.map_err(failed("the controllers cannot be read"))?;
        for name in CONTROLLERS {
            if !there.split_whitespace().any(|there| there == name) {
                return Err(format!(
                    "{} has no {name} controller: version 1 of cgroups has it",
                    top.display()
                ));
            }
        }
        let names = CONTROLLERS.map(|name| format!("+{name}")).join(" ");
        let enabled = fs::write(top.join("cgroup.subtree_control"), names);
        enabled.map_err(failed("the controllers cannot be divided"))?;
        let cgroup = Self(top.join(format!("wormhole-runs-{}", std::process::id())));
        fs::create_dir(&cgroup.0).map_err(failed("a cgroup cannot be made"))?;
        setxattr(&cgroup.0, "trusted.delegate", b"1", XattrFlags::empty())
            .map_err(|error| failed("the cgroup cannot be marked")(error.into()))?;
        Ok(cgroup)
    }

    /// Returns a command that enters the cgroup and then executes this one.
    pub fn entered_by(&self, command: &Command) -> Command {
        let mut inside = Command::new("sh");
        inside
            .args(["-c", "echo 0 > \"$0\" && exec \"$@\""])
            .arg(self.0.join("cgroup.procs"))
            .arg(command.get_program())
            .args(command.get_args())
            .stdin(Stdio::null());
        let variables = command.get_envs();
        inside.envs(variables.filter_map(|(name, value)| Some((name, value?))));
        inside
    }
}

impl Drop for Delegated {
    fn drop(&mut self) {
        // The supervisor leaves a cgroup that it was in.
        for path in fs::read_dir(&self.0).into_iter().flatten().flatten() {
            let _ = fs::remove_dir(path.path());
        }
        if let Err(error) = fs::remove_dir(&self.0) {
            eprintln!("{} is left behind: {error}", self.0.display());
        }
    }
}

/// Returns where the whole hierarchy of version 2 is mounted.
fn hierarchy() -> Result<PathBuf, String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("proc is mounted");
    let mut tops = mounts.lines().filter_map(|mount| {
        let (place, kind) = mount.split_once(" - ")?;
        let mut fields = place.split(' ').skip(3);
        let (root, at) = (fields.next()?, fields.next()?);
        (root == "/" && kind.starts_with("cgroup2 ")).then(|| Path::new(at).to_owned())
    });
    let none = || "no hierarchy of cgroups of version 2 is mounted".to_owned();
    tops.next().ok_or_else(none)
}
