//! Programs in guests that have the caller's terminal.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

use crate::harness::{Ended, PATIENCE, beside_other_guests, eventually, wormhole};
use crate::signals::{Terminal, shell_words};

/// The trap for a new size is set before the test can change the size. While it may run, nothing is a command
/// substitution: a trap that runs while bash 5.2 reads one ends bash with a syntax error.
const SCRIPT: &str = r#"
trap 'signalled=yes' WINCH
test -t 0 && test -t 1 && test -t 2 && echo "size $(stty size) $(tty) $TERM"
read -r line
signalled=
echo "read $line"
until [ "$signalled" ]; do sleep 0.1; done
echo "resized $(stty size)"
trap 'echo interrupted; exit 5' INT
echo waiting
while :; do sleep 1; done
"#;

#[test]
fn a_guests_program_has_its_callers_terminal() {
    let _beside = beside_other_guests();
    let mut command = wormhole(&["run", "--placement", "host", "-it"]);
    command.args(["--", "/bin/bash", "-c", SCRIPT]);
    let run = shell_words(&command);
    let mut terminal = Terminal::start(&format!(
        "export TERM=vt100; stty rows 30 cols 90; before=$(stty -g); {run}; echo status $?; \
         test \"$before\" = \"$(stty -g)\" && echo restored"
    ));
    let before = terminal.until("size 30 90 /dev/pts/0 vt100");
    let said = |words: &str| before.iter().any(|line| line.contains(words));
    // A guest of the emulated host boots for seconds, so the run names that phase to the person at the terminal.
    if said("using the emulated host") {
        assert!(said("booting the guest in the emulated host"), "{before:?}");
    }
    terminal.keyboard.write_all(b"some words\r").expect("keys");
    // The guest's terminal echoes them, and the caller's does not.
    assert_eq!(terminal.until("read some words"), ["some words"]);
    let size = Winsize {
        ws_row: 50,
        ws_col: 132,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(&terminal.keyboard, size).expect("it is a terminal");
    terminal.until("resized 50 132");
    terminal.until("waiting");
    terminal.press(3);
    terminal.until("interrupted");
    terminal.until("status 5");
    terminal.until("restored");
}

#[test]
fn a_terminal_is_restored_when_its_launcher_is_gone() {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let controller = openpt(flags).expect("a terminal");
    unlockpt(&controller).expect("it is ours");
    let terminal = ioctl_tiocgptpeer(&controller, flags).expect("its other side");
    let edits_lines = || {
        let modes = tcgetattr(&terminal).expect("it is a terminal");
        modes
            .local_modes
            .contains(LocalModes::ICANON | LocalModes::ECHO)
    };
    let (mut launcher, theirs) = UnixStream::pair().expect("a pair");
    let _keeper = Ended(
        wormhole(&["keep-terminal"])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(terminal.try_clone().expect("a descriptor"))
            .spawn()
            .expect("it starts"),
    );
    assert!(edits_lines());
    launcher.write_all(b"!").expect("it listens");
    launcher.read_exact(&mut [0]).expect("it answers");
    assert!(!edits_lines());
    drop(launcher);
    eventually("the terminal's modes", PATIENCE, edits_lines);
}
