//! Datagrams with descriptors between the supervisor and its helper processes.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg,
    sendmsg, socketpair,
};

/// Largest size of a message in bytes.
const LONGEST: usize = 32 << 10;
/// Largest number of descriptors in a message.
pub const DESCRIPTORS: usize = 64;

/// Creates a connected pair of sockets.
///
/// # Errors
/// Same as `socketpair`.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(socketpair(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// Sends a message as a whole or not at all.
///
/// # Errors
/// Same as `sendmsg`.
pub fn send(
    socket: &OwnedFd,
    bytes: &[u8],
    descriptors: &[OwnedFd],
    waits: bool,
) -> Result<(), Errno> {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(Errno::TOOMANYREFS);
    }
    let flags = match waits {
        true => SendFlags::NOSIGNAL,
        false => SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    };
    loop {
        match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
            Err(Errno::INTR) => {}
            sent => return sent.map(|_| ()),
        }
    }
}

/// Receives the next message and its descriptors. Returns none when the other side has closed the
/// socket.
///
/// # Errors
/// Same as `recvmsg`; `WouldBlock` if there is no message and `waits` is false.
pub fn receive(socket: &OwnedFd, waits: bool) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; LONGEST];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = match waits {
        true => RecvFlags::CMSG_CLOEXEC,
        false => RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
    };
    let count = loop {
        match recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            flags,
        ) {
            Err(Errno::INTR) => {}
            received => break received?.bytes,
        }
    };
    let descriptors = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    bytes.truncate(count);
    // Every message has at least one byte.
    Ok((count > 0).then_some((bytes, descriptors)))
}

/// Bytes of a sender that must send no descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plain {
    /// Bytes of the message, as many as fit into the buffer. An empty message also stands for the end.
    Bytes { count: usize, is_cut: bool },
    /// Descriptors came with it. The message stays in the socket, since receiving it would close
    /// them in this process.
    Descriptors,
}

/// Makes the kernel name the sender of each message that this socket receives with
/// [`receive_named`].
///
/// # Errors
/// Same as `setsockopt`.
pub fn name_senders(socket: &OwnedFd) -> io::Result<()> {
    Ok(rustix::net::sockopt::set_socket_passcred(socket, true)?)
}

/// Receives the next message on a socket that [names senders](name_senders), as
/// [`receive_plain`] does. Returns none at the end: an empty message has a sender, the end has none.
///
/// # Errors
/// Same as `recvmsg`; `AGAIN` if there is no message.
pub fn receive_named(socket: &OwnedFd, buffer: &mut [u8]) -> Result<Option<Plain>, Errno> {
    // Room for the sender and nothing else.
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let plain = receive_beside(socket, buffer, &mut control)?;
    let is_end = matches!(plain, Plain::Bytes { count: 0, .. }) && control.drain().next().is_none();
    Ok((!is_end).then_some(plain))
}

/// Returns whether the other end has received all messages, or cannot be asked.
pub fn is_read(socket: &OwnedFd) -> bool {
    let mut bytes: libc::c_int = 0;
    // SAFETY: an open descriptor, and an integer that the kernel fills.
    let known = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    known != 0 || bytes == 0
}

/// Receives the next message, or bytes of a stream, if no descriptors came with them. Does not wait.
///
/// # Errors
/// Same as `recvmsg`; `AGAIN` if there is no message.
pub fn receive_plain(socket: &OwnedFd, buffer: &mut [u8]) -> Result<Plain, Errno> {
    receive_beside(socket, buffer, &mut RecvAncillaryBuffer::default())
}

/// Receives a message whose control messages but descriptors fit into `control`.
fn receive_beside(
    socket: &OwnedFd,
    buffer: &mut [u8],
    control: &mut RecvAncillaryBuffer<'_>,
) -> Result<Plain, Errno> {
    // Descriptors for which there is no room are reported as cut. The kernel drops its references
    // of this look at the message, but the message has its own.
    let peeked = recvmsg(
        socket,
        &mut [IoSliceMut::new(buffer)],
        control,
        RecvFlags::PEEK | RecvFlags::DONTWAIT,
    )?;
    if peeked.flags.contains(ReturnFlags::CTRUNC) {
        return Ok(Plain::Descriptors);
    }
    // Drops what was just copied: only this process reads the socket.
    recv(
        socket,
        &mut buffer[..peeked.bytes.max(1)],
        RecvFlags::DONTWAIT,
    )?;
    Ok(Plain::Bytes {
        count: peeked.bytes,
        is_cut: peeked.flags.contains(ReturnFlags::TRUNC),
    })
}
