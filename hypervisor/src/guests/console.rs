//! `wormhole guest console`: connects a person to a guest's serial console.

use std::io::{self, IsTerminal, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use wormhole_link::{tasks, users};

use super::attendant::ATTACHED;
use super::{GuestsError, Place};
use crate::installation::Installation;
use crate::places::Name;
use crate::run::terminal::Keeper;
use crate::say;

/// Key that detaches a terminal: Ctrl-].
const DETACH: u8 = 0x1d;

/// Attaches until the person detaches, or the guest ends.
pub fn attach(name: &Name) -> Result<(), GuestsError> {
    let place = Place::own(name.clone())?;
    if place.running()?.is_none() {
        return Err(GuestsError::NotRunning(name.clone()));
    }
    let failed = |source| GuestsError::Console {
        name: name.clone(),
        source,
    };
    let installation = Installation::locate()?;
    let mut stream = connect(&place.socket(), name)?;
    let mut first = [0];
    stream.read_exact(&mut first).map_err(failed)?;
    if first != [ATTACHED] {
        let mut reason = String::new();
        let _ = stream.read_to_string(&mut reason);
        reason.insert(0, char::from(first[0]));
        return Err(GuestsError::Attached(reason));
    }
    let is_terminal = io::stdin().is_terminal();
    let keeper = is_terminal.then(|| Keeper::start(installation.command()));
    let keeper = keeper.transpose().map_err(failed)?;
    if let Some(keeper) = &keeper {
        say::line(format_args!(
            "attached to the console of guest {name}: Ctrl-] detaches"
        ));
        keeper.handle().make_raw();
    }
    let detached = Arc::new(AtomicBool::new(false));
    let typing = (stream.try_clone().map_err(failed)?, Arc::clone(&detached));
    // The thread is never joined: it may wait for a key.
    tasks::spawn("input", move || {
        let is_over = type_in(&typing.0, is_terminal);
        typing.1.store(is_over, Ordering::SeqCst);
        let _ = typing.0.shutdown(Shutdown::Both);
    })
    .map_err(failed)?;
    show(&mut stream);
    drop(keeper);
    match detached.load(Ordering::SeqCst) {
        true => say::line(format_args!("detached from the console of guest {name}")),
        false => say::line(format_args!("guest {name} has ended")),
    }
    Ok(())
}

/// Connects to a guest's attendant.
///
/// # Errors
/// There is none, or the process that listens is another user's: it would read what the person types, and its bytes would
/// reach the person's terminal.
fn connect(socket: &Path, name: &Name) -> Result<UnixStream, GuestsError> {
    let failed = |source| GuestsError::Console {
        name: name.clone(),
        source,
    };
    let stream = UnixStream::connect(socket).map_err(failed)?;
    let user = users::peer_of(&stream).map_err(failed)?.user;
    match users::is_believed(user) {
        true => Ok(stream),
        false => Err(GuestsError::Foreign {
            name: name.clone(),
            user,
        }),
    }
}

/// Copies standard input to the console, up to the key that detaches a terminal. Returns false if the guest is gone.
fn type_in(mut stream: &UnixStream, is_terminal: bool) -> bool {
    let mut bytes = [0; 4096];
    let mut stdin = io::stdin().lock();
    while let Ok(count @ 1..) = stdin.read(&mut bytes) {
        let typed = &bytes[..count];
        let end = match is_terminal {
            true => typed.iter().position(|byte| *byte == DETACH),
            false => None,
        };
        let sent = stream.write_all(&typed[..end.unwrap_or(count)]);
        if sent.is_err() || end.is_some() {
            return sent.is_ok();
        }
    }
    true
}

/// Copies the console to standard output, without waiting for whole lines.
fn show(stream: &mut UnixStream) {
    let mut bytes = [0; 4096];
    let mut stdout = io::stdout();
    while let Ok(count @ 1..) = stream.read(&mut bytes) {
        let shown = stdout.write_all(&bytes[..count]);
        if shown.and_then(|()| stdout.flush()).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
    use rustix::process::{Uid, geteuid};
    use rustix::thread::set_thread_res_uid;

    use super::*;

    #[test]
    fn a_console_of_another_user_is_not_attached_to() {
        if !geteuid().is_root() {
            eprintln!("skipped: only root has processes of another user");
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let name: Name = "one".parse().expect("a name");
        for (user, is_foreign) in [(0, false), (65534, true)] {
            let path = folder.path().join(user.to_string());
            let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).expect("a socket");
            let address = SocketAddrUnix::new(&path).expect("an address");
            bind(&listener, &address).expect("it is bound");
            // The kernel notes the user of the thread that listens.
            let listening = std::thread::spawn(move || {
                let user = Uid::from_raw(user);
                set_thread_res_uid(user, user, user).expect("root may");
                listen(&listener, 1).expect("it listens");
                listener
            });
            let _listener = listening.join().expect("no panic");
            let connected = connect(&path, &name);
            let refused = matches!(connected, Err(GuestsError::Foreign { user: 65534, .. }));
            assert_eq!(refused, is_foreign);
            assert_eq!(connected.is_ok(), !is_foreign);
        }
    }
}
