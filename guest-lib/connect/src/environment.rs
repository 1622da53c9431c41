//! The environment, and whether it may be believed.

/// Returns whether this program has more rights than the user who set its environment: a program with a set-user-ID bit or
/// with file capabilities (getauxval(3), `AT_SECURE`).
#[must_use]
pub fn is_of_another_user() -> bool {
    // SAFETY: the call takes an integer only.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// Returns a variable that chooses whom this program gives its memory to. `None` if another user has set it.
#[must_use]
pub fn trusted(name: &str) -> Option<String> {
    if is_of_another_user() {
        return None;
    }
    std::env::var(name).ok()
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    use std::process::Command;

    use super::*;

    const NAME: &str = "WORMHOLE_TEST_OF_TRUST";

    #[test]
    fn a_set_user_id_program_does_not_believe_its_caller() {
        if fs::metadata("/proc/self").unwrap().uid() != 0 {
            println!("skipped: needs root");
            return;
        }
        // Folders for temporary files often ignore such bits.
        let own = std::env::current_exe().unwrap();
        let program = own.with_extension(format!("of-nobody-{}", std::process::id()));
        fs::copy(&own, &program).unwrap();
        let trusts = |mode| {
            fs::set_permissions(&program, Permissions::from_mode(mode)).unwrap();
            let mut command = Command::new(&program);
            command.args(["--exact", "environment::tests::tells", "--nocapture"]);
            let said = command.env(NAME, "here").output().unwrap();
            String::from_utf8_lossy(&said.stdout).contains("trusted Some(\"here\")")
        };
        chown(&program, Some(65534), None).unwrap();
        let results = [0o755, 0o4755].map(trusts);
        fs::remove_file(&program).unwrap();
        assert_eq!(results, [true, false]);
    }

    /// Program of the test above.
    #[test]
    fn tells() {
        println!("trusted {:?}", trusted(NAME));
    }
}
