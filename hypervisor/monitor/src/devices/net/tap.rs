//! Opens tap interfaces of the host.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6,
};

use super::device::{HEADER_LEN, OFFLOADS};
use super::frame::GuestFrame;
use super::host_end::HostEnd;

/// Error from opening a tap interface.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The name cannot be an interface's.
    #[error(
        "{name:?} cannot be the name of a network interface: it has 1 to {most} bytes",
        most = libc::IFNAMSIZ - 1
    )]
    Name {
        /// Name as given.
        name: String,
    },
    /// The host has no tap driver, or the user may not use it.
    #[error("cannot open /dev/net/tun")]
    Driver(#[source] io::Error),
    /// The host has no interface of this name. The kernel would create one, without address and until the guest's end.
    #[error(
        "there is no tap interface {name}: create it with `ip tuntap add dev {name} mode tap user USER` and bring it up"
    )]
    Missing {
        /// Name of the interface.
        name: String,
    },
    /// The interface is another user's, has a guest already, or is no tap interface.
    #[error(
        "cannot attach to the tap interface {name}: it must belong to this user, be free, and have been created as a \
         tap"
    )]
    Attach {
        /// Name of the interface.
        name: String,
        /// Error from TUNSETIFF.
        source: io::Error,
    },
    /// The interface does not support virtio's headers.
    #[error("the tap interface {name} does not take virtio headers")]
    Header {
        /// Name of the interface.
        name: String,
        /// Error from TUNSETVNETHDRSZ.
        source: io::Error,
    },
}

/// A tap interface, or a socket that preserves the boundaries of frames. Reads and writes do not block.
#[derive(Debug)]
pub struct Tap {
    file: File,
    /// Whether the kernel's tap driver serves `file`, so that it has offloads to set.
    has_offloads: bool,
}

impl Tap {
    /// Attaches to the host's tap interface `name`, which must exist. The caller needs CAP_NET_ADMIN, or the interface must belong to its
    /// user.
    pub fn open(name: &str) -> Result<Self, TapError> {
        let bad_name = || TapError::Name {
            name: name.to_owned(),
        };
        let terminated = CString::new(name).map_err(|_| bad_name())?;
        let bytes = terminated.to_bytes_with_nul();
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        let mut request = libc::ifreq {
            ifr_name: [0; libc::IFNAMSIZ],
            ifr_ifru: libc::__c_anonymous_ifr_ifru {
                // The flags use bit 14 of the 16 bits at most.
                ifru_flags: i16::try_from(flags).unwrap_or_default(),
            },
        };
        if name.is_empty() || bytes.len() > request.ifr_name.len() {
            return Err(bad_name());
        }
        for (to, from) in request.ifr_name.iter_mut().zip(bytes) {
            *to = from.cast_signed();
        }
        if !exists(name) {
            return Err(TapError::Missing {
                name: name.to_owned(),
            });
        }
        let open = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open("/dev/net/tun", open, Mode::empty())
            .map_err(|error| TapError::Driver(error.into()))?;
        let file = File::from(file);
        // SAFETY: the kernel reads and writes one `ifreq`, which lives across the call.
        let attached = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
        if attached != 0 {
            return Err(TapError::Attach {
                name: name.to_owned(),
                source: io::Error::last_os_error(),
            });
        }
        let size = libc::c_int::try_from(HEADER_LEN).unwrap_or_default();
        // SAFETY: the kernel reads one `int`, which lives across the call.
        let sized =
            unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const size) };
        if sized != 0 {
            return Err(TapError::Header {
                name: name.to_owned(),
                source: io::Error::last_os_error(),
            });
        }
        Ok(Self {
            file,
            has_offloads: true,
        })
    }

    /// Uses a datagram socket in place of an interface. The peer's datagrams are frames with virtio's header.
    pub fn from_socket(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self {
            file: socket.into(),
            has_offloads: false,
        })
    }

    /// Lets the host leave to the guest the checksums and the segmentation that the driver negotiated.
    fn set_offloads(&self, features: u64) -> io::Result<()> {
        if !self.has_offloads {
            return Ok(());
        }
        let offloads = [
            (VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
            (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
            (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
            (VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN),
        ];
        let bits = offloads
            .iter()
            .filter(|(feature, _)| features & 1 << feature != 0)
            .fold(0, |bits, (_, offload)| bits | offload);
        let bits = libc::c_ulong::from(bits);
        // SAFETY: the request takes its argument by value.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETOFFLOAD, bits) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl HostEnd for Tap {
    fn features(&self) -> u64 {
        OFFLOADS.iter().fold(0, |bits, bit| bits | 1 << bit)
    }

    fn start(&mut self, features: u64) -> io::Result<()> {
        self.set_offloads(features)
    }

    fn receive(&mut self, frame: &mut [u8]) -> io::Result<usize> {
        self.file.read(frame)
    }

    fn send(&mut self, frame: &GuestFrame<'_>) -> io::Result<()> {
        // The interface takes whole frames.
        frame.write_to(&self.file)
    }

    fn is_blocked(&mut self) -> bool {
        false
    }
}

/// Returns whether the host has a network interface of this name.
fn exists(name: &str) -> bool {
    let kind = SocketType::DGRAM;
    let socket = rustix::net::socket_with(AddressFamily::INET, kind, SocketFlags::CLOEXEC, None);
    socket.is_ok_and(|socket| rustix::net::netdevice::name_to_index(socket, name).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_interface_has_are_refused() {
        for name in ["", "a name that is longer", "a\0b"] {
            let error = Tap::open(name).expect_err("no interface");
            assert!(matches!(error, TapError::Name { .. }), "{error}");
        }
    }
}
