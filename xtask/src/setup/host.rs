//! Decides what set-up must install on this machine, before it changes anything.

use std::path::Path;
use std::process::{Command, Stdio};

/// Required tools and files: the name in PATH, or an absolute path, and its Debian package.
const PACKAGES: [(&str, &str); 8] = [
    ("g++", "g++"),
    ("make", "make"),
    ("python3", "python3"),
    (PIP, "python3-pip"),
    ("dpkg-deb", "dpkg"),
    ("ip", "iproute2"),
    ("passt", "passt"),
    (
        "/usr/share/keyrings/debian-archive-keyring.gpg",
        "debian-archive-keyring",
    ),
];

/// Tools as in [`PACKAGES`] that only the tests need, which build a disk image and define a domain of libvirt.
const TEST_PACKAGES: [(&str, &str); 4] = [
    ("mmdebstrap", "mmdebstrap"),
    ("/sbin/mke2fs", "e2fsprogs"),
    ("/usr/sbin/libvirtd", "libvirt-daemon"),
    ("virsh", "libvirt-clients"),
];

/// Stands for `python3 -m pip`.
const PIP: &str = "pip";

/// Debian's package of QEMU.
pub const QEMU_PACKAGE: &str = "qemu-system-x86";

/// First QEMU whose emulation of virtualization is reliable on a loaded machine: with QEMU 7.2 about one run in twenty
/// hangs or dies there.
pub const QEMU: u32 = 10;

/// Facts about a machine that decide what set-up does.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The processor's architecture, as Rust names it.
    pub architecture: String,
    /// The text of `/etc/os-release`.
    pub os_release: String,
    /// Entries of [`PACKAGES`] and [`TEST_PACKAGES`], `apt-get`, `sudo` and `rustup` that exist.
    pub found: Vec<String>,
    /// Whether this process runs as root.
    pub root: bool,
    /// Major version of QEMU, if it is installed.
    pub qemu: Option<u32>,
    /// Whether Rust's nightly toolchain with miri is installed.
    pub nightly: bool,
}

/// Packages to install with apt.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Packages from the system's own sources.
    pub packages: Vec<&'static str>,
    /// Whether QEMU comes from Debian 12's backports.
    pub backports: bool,
    /// Warning for the user.
    pub note: Option<String>,
}

impl Facts {
    /// Collects the facts of this machine.
    pub fn of_this_machine() -> Self {
        let names = PACKAGES.iter().chain(&TEST_PACKAGES);
        let names = names.map(|&(name, _)| name);
        let found = names
            .chain(["apt-get", "sudo", "rustup"])
            .filter(|&name| is_there(name))
            .map(str::to_owned)
            .collect();
        Self {
            architecture: std::env::consts::ARCH.to_owned(),
            os_release: std::fs::read_to_string("/etc/os-release").unwrap_or_default(),
            found,
            root: rustix::process::geteuid().is_root(),
            qemu: qemu_version(),
            nightly: has_miri(),
        }
    }

    /// Decides what to install for the demo, and with `tests` for the tests. Fails with a sentence that says what the
    /// user must do first.
    pub fn plan(&self, tests: bool) -> Result<Plan, String> {
        if self.architecture != "x86_64" {
            return Err(format!(
                "Wormhole runs on x86-64 alone, and this machine is {}",
                self.architecture
            ));
        }
        let mut plan = self.packages(tests);
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
                "the tests need Rust's nightly toolchain with miri: install rustup (https://rustup.rs)"
                    .to_owned(),
            );
        }
        if plan.note.is_none() && !plan.backports {
            plan.note = self.qemu.filter(|&version| version < QEMU).map(old_qemu);
        }
        Ok(plan)
    }

    fn packages(&self, tests: bool) -> Plan {
        let of_tests = TEST_PACKAGES.iter().filter(|_| tests);
        let packages = PACKAGES.iter().chain(of_tests);
        let packages = packages.filter(|(name, _)| !self.has(name));
        let mut plan = Plan {
            packages: packages.map(|&(_, package)| package).collect(),
            ..Plan::default()
        };
        // Keeps an old QEMU if the user cannot install packages.
        let newer = self
            .qemu
            .is_none_or(|version| version < QEMU && self.may_install());
        // QEMU comes from one source only, backports or the system's own.
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

    /// Returns true if this is the named distribution or derived from it.
    fn is_like(&self, name: &str) -> bool {
        [self.field("ID"), self.field("ID_LIKE")]
            .into_iter()
            .flatten()
            .flat_map(str::split_whitespace)
            .any(|word| word == name)
    }

    /// Returns a field of os-release(5).
    fn field(&self, name: &str) -> Option<&str> {
        self.os_release.lines().find_map(|line| {
            let value = line.strip_prefix(name)?.strip_prefix('=')?;
            Some(value.trim_matches(['"', '\'']))
        })
    }
}

/// Returns the warning about an old QEMU.
pub fn old_qemu(version: u32) -> String {
    format!(
        "QEMU {version} is older than {QEMU}: where KVM cannot run Linux guests, about one run in twenty fails under load and is worth repeating"
    )
}

/// Returns true if a tool is in PATH, or if the file at an absolute path exists.
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

/// Returns the major version of QEMU, if it is installed and prints one.
pub fn qemu_version() -> Option<u32> {
    let output = Command::new("qemu-system-x86_64")
        .arg("--version")
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.split("version ").nth(1)?;
    version.split('.').next()?.parse().ok()
}

/// Returns true if the nightly toolchain is installed with miri.
pub fn has_miri() -> bool {
    succeeds("cargo", &["+nightly", "miri", "--version"])
}

fn succeeds(program: &str, args: &[&str]) -> bool {
    Command::new(program)
        .args(args)
        // Without this, rustup would use the toolchain that runs this command instead of the named one.
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

    /// Returns a machine with only apt and root.
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

    /// Returns a machine with everything that the demo needs.
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
    fn an_old_qemu_without_a_newer_one_is_reported() {
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
    fn without_apt_the_error_lists_the_packages_to_install() {
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
    fn without_sudo_the_error_lists_the_packages_that_root_must_install() {
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
    fn only_the_tests_build_disks_and_define_domains() {
        let facts = Facts {
            nightly: true,
            ..furnished(BOOKWORM)
        };
        assert_eq!(facts.plan(false), Ok(Plan::default()));
        let plan = facts.plan(true).expect("set-up works here");
        assert_eq!(plan.packages, TEST_PACKAGES.map(|(_, package)| package));
    }

    #[test]
    fn only_the_tests_need_rustup() {
        let mut facts = furnished(BOOKWORM);
        let of_tests = TEST_PACKAGES.map(|(name, _)| name.to_owned());
        facts.found.extend(of_tests);
        assert_eq!(facts.plan(false), Ok(Plan::default()));
        assert!(refusal(&facts, true).contains("rustup"));
        let ready = Facts {
            nightly: true,
            ..facts
        };
        assert_eq!(ready.plan(true), Ok(Plan::default()));
    }
}
