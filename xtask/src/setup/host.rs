//! What set-up needs of this machine, decided before anything is changed.

use std::path::Path;
use std::process::{Command, Stdio};

/// Tools and files of Debian packages: the name to look for in PATH, or a whole path; and its package.
const PACKAGES: [(&str, &str); 6] = [
    ("g++", "g++"),
    ("make", "make"),
    ("python3", "python3"),
    (PIP, "python3-pip"),
    ("dpkg-deb", "dpkg"),
    (
        "/usr/share/keyrings/debian-archive-keyring.gpg",
        "debian-archive-keyring",
    ),
];

/// Stands for `python3 -m pip`.
const PIP: &str = "pip";

/// Debian's package of QEMU.
pub const QEMU_PACKAGE: &str = "qemu-system-x86";

/// The first QEMU whose emulation of virtualization takes a loaded machine: of QEMU 7.2's, about one in
/// twenty hangs or dies then.
pub const QEMU: u32 = 10;

/// The facts about a machine that decide what set-up does.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The processor's architecture, as Rust names it.
    pub architecture: String,
    /// The text of `/etc/os-release`.
    pub os_release: String,
    /// Entries of [`PACKAGES`], `apt-get`, `sudo` and `rustup` that are there.
    pub found: Vec<String>,
    /// Whether this process is root's.
    pub root: bool,
    /// The major version of QEMU, if it is there.
    pub qemu: Option<u32>,
    /// Whether Rust's nightly toolchain has miri, and cargo-fuzz is there.
    pub nightly: bool,
}

/// What is to be installed by apt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Packages of the system's own sources.
    pub packages: Vec<&'static str>,
    /// Whether QEMU comes from Debian 12's backports.
    pub backports: bool,
    /// Facts that the user should hear of.
    pub note: Option<String>,
}

impl Facts {
    /// Looks at this machine.
    pub fn of_this_machine() -> Self {
        let names = PACKAGES.iter().map(|&(name, _)| name);
        let found = names
            .chain(["apt-get", "sudo", "rustup"])
            .filter(|&name| is_there(name))
            .map(str::to_owned)
            .collect();
        Self {
            architecture: std::env::consts::ARCH.to_owned(),
            os_release: std::fs::read_to_string("/etc/os-release").unwrap_or_default(),
            found,
            // SAFETY: geteuid takes nothing and always succeeds.
            root: unsafe { libc::geteuid() } == 0,
            qemu: qemu_version(),
            nightly: has_miri() && has_cargo_fuzz(),
        }
    }

    /// Decides what to install for the demo, and for the tests with `tests`; or says in a sentence what the user has
    /// to do first.
    pub fn plan(&self, tests: bool) -> Result<Plan, String> {
        if self.architecture != "x86_64" {
            return Err(format!(
                "Wormhole runs on x86-64 alone, and this machine is {}",
                self.architecture
            ));
        }
        let mut plan = self.packages();
        let mut wanted = plan.packages.clone();
        wanted.extend(plan.backports.then_some(QEMU_PACKAGE));
        let wanted = wanted.join(" ");
        if !self.has("apt-get") {
            let others = if wanted.is_empty() {
                String::new()
            } else {
                format!(", and what these Debian packages hold: {wanted}")
            };
            return Err(format!(
                "there is no apt-get, by which Debian's kernels are fetched: install apt{others}; or use Debian or Ubuntu"
            ));
        }
        if !wanted.is_empty() && !self.is_like("debian") {
            return Err(format!(
                "this is neither Debian nor Ubuntu: install what these Debian packages hold: {wanted}"
            ));
        }
        if !wanted.is_empty() && !self.may_install() {
            return Err(format!(
                "installing Debian packages needs root or sudo: install these as root: {wanted}"
            ));
        }
        if tests && !self.nightly && !self.has("rustup") {
            return Err(
                "the tests need Rust's nightly toolchain with miri, and cargo-fuzz: install rustup (https://rustup.rs)"
                    .to_owned(),
            );
        }
        if plan.note.is_none() && !plan.backports {
            plan.note = self.qemu.filter(|&version| version < QEMU).map(old_qemu);
        }
        Ok(plan)
    }

    fn packages(&self) -> Plan {
        let packages = PACKAGES.iter().filter(|(name, _)| !self.has(name));
        let mut plan = Plan {
            packages: packages.map(|&(_, package)| package).collect(),
            ..Plan::default()
        };
        // An old QEMU works as well, where nobody can install a newer one.
        let newer = self
            .qemu
            .is_none_or(|version| version < QEMU && self.may_install());
        // Two sources of QEMU would install it twice.
        if newer && self.is_bookworm() {
            plan.backports = true;
        } else if self.qemu.is_none() {
            plan.packages.push(QEMU_PACKAGE);
        }
        plan
    }

    fn may_install(&self) -> bool {
        self.root || self.has("sudo")
    }

    fn has(&self, name: &str) -> bool {
        self.found.iter().any(|found| found == name)
    }

    fn is_bookworm(&self) -> bool {
        self.is_like("debian") && self.field("VERSION_CODENAME") == Some("bookworm")
    }

    /// Whether this is the named distribution or made from it.
    fn is_like(&self, name: &str) -> bool {
        [self.field("ID"), self.field("ID_LIKE")]
            .into_iter()
            .flatten()
            .flat_map(str::split_whitespace)
            .any(|word| word == name)
    }

    /// A field of os-release(5).
    fn field(&self, name: &str) -> Option<&str> {
        self.os_release.lines().find_map(|line| {
            let value = line.strip_prefix(name)?.strip_prefix('=')?;
            Some(value.trim_matches(['"', '\'']))
        })
    }
}

/// Says what an old QEMU means.
pub fn old_qemu(version: u32) -> String {
    format!(
        "QEMU {version} is older than {QEMU}: where KVM cannot run Linux guests, about one run in twenty fails under load and is worth repeating"
    )
}

/// Whether a tool is in PATH, or a file at its place.
fn is_there(name: &str) -> bool {
    if name == PIP {
        return succeeds("python3", &["-m", "pip", "--version"]);
    }
    if name.starts_with('/') {
        return Path::new(name).exists();
    }
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder.join(name).is_file()))
}

/// The major version of QEMU, if it is there and says one.
pub fn qemu_version() -> Option<u32> {
    let output = Command::new("qemu-system-x86_64")
        .arg("--version")
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split("version ").nth(1)?;
    version.split('.').next()?.parse().ok()
}

/// Whether the nightly toolchain is there, with miri.
pub fn has_miri() -> bool {
    succeeds("cargo", &["+nightly", "miri", "--version"])
}

/// Whether cargo-fuzz is there.
pub fn has_cargo_fuzz() -> bool {
    succeeds("cargo", &["fuzz", "--version"])
}

fn succeeds(program: &str, args: &[&str]) -> bool {
    Command::new(program)
        .args(args)
        // The toolchain that runs this command must not be asked in the place of the named one.
        .env_remove("RUSTUP_TOOLCHAIN")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOOKWORM: &str = "ID=debian\nVERSION_ID=\"12\"\nVERSION_CODENAME=bookworm\n";
    const TRIXIE: &str = "ID=debian\nVERSION_ID=\"13\"\nVERSION_CODENAME=trixie\n";
    const NOBLE: &str = "ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=noble\n";
    const FEDORA: &str = "ID=fedora\nVERSION_ID=42\n";

    /// A machine with apt and root, without anything else.
    fn bare(os_release: &str) -> Facts {
        Facts {
            architecture: "x86_64".into(),
            os_release: os_release.into(),
            found: vec!["apt-get".into(), "dpkg-deb".into()],
            root: true,
            qemu: None,
            nightly: false,
        }
    }

    /// A machine with everything that the demo needs.
    fn furnished(os_release: &str) -> Facts {
        let mut facts = bare(os_release);
        facts.found = PACKAGES.map(|(name, _)| name.to_owned()).to_vec();
        facts.found.push("apt-get".into());
        facts.qemu = Some(QEMU);
        facts
    }

    fn refusal(facts: &Facts, tests: bool) -> String {
        facts.plan(tests).expect_err("set-up cannot work here")
    }

    #[test]
    fn debian_12_takes_qemu_once_and_from_backports() {
        for qemu in [None, Some(7)] {
            let facts = Facts {
                qemu,
                ..bare(BOOKWORM)
            };
            let plan = facts.plan(false).expect("set-up works here");
            assert!(plan.backports, "QEMU {qemu:?}");
            assert!(!plan.packages.contains(&QEMU_PACKAGE), "QEMU {qemu:?}");
            assert!(plan.packages.contains(&"g++"), "QEMU {qemu:?}");
            assert_eq!(plan.note, None, "QEMU {qemu:?}");
        }
    }

    #[test]
    fn other_releases_take_qemu_from_their_own_archive() {
        for release in [TRIXIE, NOBLE] {
            let plan = bare(release).plan(false).expect("set-up works here");
            assert!(!plan.backports, "{release}");
            assert!(plan.packages.contains(&QEMU_PACKAGE), "{release}");
        }
    }

    #[test]
    fn nothing_is_installed_where_all_is_there() {
        for release in [BOOKWORM, TRIXIE, NOBLE, FEDORA] {
            let plan = furnished(release).plan(false);
            assert_eq!(plan, Ok(Plan::default()), "{release}");
        }
    }

    #[test]
    fn an_old_qemu_without_a_newer_one_is_told() {
        let facts = Facts {
            qemu: Some(8),
            ..furnished(NOBLE)
        };
        let plan = facts.plan(false).expect("set-up works here");
        assert_eq!(plan.packages, Vec::<&str>::new());
        assert!(plan.note.is_some_and(|note| note.contains("QEMU 8")));
    }

    #[test]
    fn a_user_without_sudo_works_with_the_old_qemu_that_is_there() {
        let facts = Facts {
            root: false,
            qemu: Some(7),
            ..furnished(BOOKWORM)
        };
        let plan = facts.plan(false).expect("set-up works here");
        assert_eq!(plan.packages, Vec::<&str>::new());
        assert!(!plan.backports);
        assert!(plan.note.is_some_and(|note| note.contains("QEMU 7")));
    }

    #[test]
    fn another_architecture_is_refused() {
        let facts = Facts {
            architecture: "aarch64".into(),
            ..furnished(BOOKWORM)
        };
        assert!(refusal(&facts, false).contains("x86-64 alone"));
    }

    #[test]
    fn a_machine_without_apt_is_told_what_to_install() {
        let facts = Facts {
            found: vec!["g++".into()],
            ..bare(FEDORA)
        };
        let said = refusal(&facts, false);
        for word in ["apt-get", "python3-pip", QEMU_PACKAGE] {
            assert!(said.contains(word), "{said}");
        }
        assert!(!said.contains("g++"), "{said}");
    }

    #[test]
    fn packages_are_not_forced_on_a_system_that_is_not_debians() {
        let said = refusal(&bare(FEDORA), false);
        assert!(said.contains("neither Debian nor Ubuntu"), "{said}");
    }

    #[test]
    fn a_user_without_sudo_is_told_what_root_must_install() {
        let facts = Facts {
            root: false,
            ..bare(BOOKWORM)
        };
        let said = refusal(&facts, false);
        assert!(
            said.contains("as root") && said.contains(QEMU_PACKAGE),
            "{said}"
        );
        let furnished = Facts {
            root: false,
            ..furnished(BOOKWORM)
        };
        assert_eq!(furnished.plan(false), Ok(Plan::default()));
    }

    #[test]
    fn only_the_tests_need_rustup() {
        let facts = furnished(BOOKWORM);
        assert_eq!(facts.plan(false), Ok(Plan::default()));
        assert!(refusal(&facts, true).contains("rustup"));
        let ready = Facts {
            nightly: true,
            ..facts
        };
        assert_eq!(ready.plan(true), Ok(Plan::default()));
    }
}
