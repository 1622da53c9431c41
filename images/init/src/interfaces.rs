//! Configures network interfaces by ioctl(2), as netdevice(7) describes.

use std::ffi::{c_char, c_int, c_long, c_short, c_ulong, c_ushort, c_void};
use std::fs::{self, File};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use wormhole_init::Network;

/// Requests of `linux/sockios.h` that the libc crate lacks.
const SIOCBRADDBR: libc::Ioctl = 0x89a0;
const SIOCBRADDIF: libc::Ioctl = 0x89a2;

/// Flags of a route through a gateway, of `linux/route.h`.
const RTF_UP: c_ushort = 1;
const RTF_GATEWAY: c_ushort = 2;

const NAME_SERVERS: &str = "/etc/resolv.conf";

/// `struct rtentry` of `linux/route.h`.
#[repr(C)]
struct Route {
    pad1: c_ulong,
    destination: libc::sockaddr,
    gateway: libc::sockaddr,
    mask: libc::sockaddr,
    flags: c_ushort,
    pad2: c_short,
    pad3: c_ulong,
    pad4: *mut c_void,
    metric: c_short,
    device: *mut c_char,
    mtu: c_ulong,
    window: c_ulong,
    round_trip_time: c_ushort,
}

#[derive(Debug, thiserror::Error)]
pub enum InterfaceError {
    #[error("the kernel has no IPv4 sockets: {0}")]
    Socket(io::Error),
    #[error("cannot configure the network interface {name} ({request}): {source}")]
    Request {
        name: String,
        request: &'static str,
        source: io::Error,
    },
    #[error(
        "this machine has no network interface {0}: its image has no driver for it, or one that failed; \
         `wormhole image build guest --rebuild` adds the driver to an older image"
    )]
    Missing(String),
    #[error(
        "cannot make the tap interface {name}: {source}; `wormhole image build emulated-host --rebuild` adds the \
         driver to an older image"
    )]
    Tap { name: String, source: io::Error },
    #[error("cannot write {NAME_SERVERS}: {0}")]
    NameServers(io::Error),
}

/// Brings the loopback interface up. Ignores failures, since few programs need it.
pub fn loopback() {
    let _ = Control::new().and_then(|control| control.up("lo"));
}

/// Gives `eth0`, `eth1` and so on their addresses, brings them up, and writes the resolver's configuration.
pub fn configure(networks: &[Network]) -> Result<(), InterfaceError> {
    if networks.is_empty() {
        return Ok(());
    }
    let control = Control::new()?;
    for (number, network) in networks.iter().enumerate() {
        let name = format!("eth{number}");
        let address = |request| move |to: &mut libc::ifreq| to.ifr_ifru.ifru_addr = request;
        control.request(
            &name,
            ("SIOCSIFADDR", libc::SIOCSIFADDR),
            address(socket_address(network.address())),
        )?;
        control.request(
            &name,
            ("SIOCSIFNETMASK", libc::SIOCSIFNETMASK),
            address(socket_address(network.mask())),
        )?;
        control.up(&name)?;
        if let Some(gateway) = network.gateway() {
            control.add_default_route(&name, gateway)?;
        }
    }
    let servers = networks.iter().filter_map(Network::dns);
    let servers: String = servers
        .map(|server| format!("nameserver {server}\n"))
        .collect();
    if servers.is_empty() {
        return Ok(());
    }
    // A host's file may be a link to a service's, which a guest does not have.
    let _ = fs::remove_file(NAME_SERVERS);
    fs::write(NAME_SERVERS, servers).map_err(InterfaceError::NameServers)
}

/// Makes the tap interfaces `tap0`, `tap1` and so on, and bridges each with the `eth` interface of its number.
pub fn bridge_taps(count: usize) -> Result<(), InterfaceError> {
    if count == 0 {
        return Ok(());
    }
    let control = Control::new()?;
    for number in 0..count {
        let tap = format!("tap{number}");
        make_tap(&tap).map_err(|source| InterfaceError::Tap {
            name: tap.clone(),
            source,
        })?;
        control.bridge(&format!("br{number}"), &[&format!("eth{number}"), &tap])?;
    }
    Ok(())
}

/// Socket for requests to the network stack.
struct Control(OwnedFd);

impl Control {
    fn new() -> Result<Self, InterfaceError> {
        let (family, kind) = (AddressFamily::INET, SocketType::DGRAM);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None);
        socket
            .map(Self)
            .map_err(|error| InterfaceError::Socket(error.into()))
    }

    /// Makes a request about the interface `name`, whose argument `set` fills. Returns the argument.
    fn request(
        &self,
        name: &str,
        (request, number): (&'static str, libc::Ioctl),
        set: impl FnOnce(&mut libc::ifreq),
    ) -> Result<libc::ifreq, InterfaceError> {
        let mut argument = named(name);
        set(&mut argument);
        // SAFETY: the callers name requests that read or write one `ifreq`, or at its start a name.
        let done = unsafe { libc::ioctl(self.0.as_raw_fd(), number, &raw mut argument) };
        match done {
            0 => Ok(argument),
            _ => Err(failed(name, request)),
        }
    }

    fn up(&self, name: &str) -> Result<(), InterfaceError> {
        let flags = c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or_default();
        self.request(name, ("SIOCSIFFLAGS", libc::SIOCSIFFLAGS), |to| {
            to.ifr_ifru.ifru_flags = flags;
        })
        .map(drop)
    }

    fn add_default_route(&self, name: &str, gateway: Ipv4Addr) -> Result<(), InterfaceError> {
        let any = socket_address(Ipv4Addr::UNSPECIFIED);
        let route = Route {
            pad1: 0,
            destination: any,
            gateway: socket_address(gateway),
            mask: any,
            flags: RTF_UP | RTF_GATEWAY,
            pad2: 0,
            pad3: 0,
            pad4: std::ptr::null_mut(),
            metric: 0,
            device: std::ptr::null_mut(),
            mtu: 0,
            window: 0,
            round_trip_time: 0,
        };
        // SAFETY: the kernel reads one `rtentry`, which `route` is; its null pointers name no device.
        match unsafe { libc::ioctl(self.0.as_raw_fd(), libc::SIOCADDRT, &raw const route) } {
            0 => Ok(()),
            _ => Err(failed(name, "SIOCADDRT")),
        }
    }

    /// Makes a bridge of these ports. Without the spanning tree protocol, frames pass as soon as a port is up.
    fn bridge(&self, name: &str, ports: &[&str]) -> Result<(), InterfaceError> {
        self.request(name, ("SIOCBRADDBR", SIOCBRADDBR), |_| ())?;
        for port in ports {
            let found = self.request(port, ("SIOCGIFINDEX", libc::SIOCGIFINDEX), |_| ())?;
            // SAFETY: the request has written this field.
            let index: c_int = unsafe { found.ifr_ifru.ifru_ifindex };
            self.request(name, ("SIOCBRADDIF", SIOCBRADDIF), |to| {
                to.ifr_ifru.ifru_ifindex = index;
            })?;
            self.up(port)?;
        }
        self.up(name)
    }
}

fn failed(name: &str, request: &'static str) -> InterfaceError {
    let (name, source) = (name.to_owned(), io::Error::last_os_error());
    match source.raw_os_error() {
        Some(libc::ENODEV) => InterfaceError::Missing(name),
        _ => InterfaceError::Request {
            name,
            request,
            source,
        },
    }
}

/// Makes a tap interface that stays when its descriptor is closed.
fn make_tap(name: &str) -> io::Result<()> {
    let driver = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    let mut argument = named(name);
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    // The flags use bit 14 of the 16 bits at most.
    argument.ifr_ifru.ifru_flags = c_short::try_from(flags).unwrap_or_default();
    let stays: c_long = 1;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`; TUNSETPERSIST takes its argument by value.
    let done = unsafe {
        libc::ioctl(driver.as_raw_fd(), libc::TUNSETIFF, &raw mut argument) == 0
            && libc::ioctl(driver.as_raw_fd(), libc::TUNSETPERSIST, stays) == 0
    };
    if done {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Returns a request's argument for the interface `name`, which is shorter than the field.
fn named(name: &str) -> libc::ifreq {
    // SAFETY: all fields of the structure are integers, byte arrays or pointers, for which zero is valid.
    let mut argument: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in argument.ifr_name.iter_mut().zip(name.bytes()) {
        *to = c_char::from_ne_bytes([from]);
    }
    argument
}

/// Returns the address as `struct sockaddr_in`, in the form of the requests' arguments.
fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    // The port, which these requests ignore, precedes the address.
    for (to, from) in data[2..].iter_mut().zip(address.octets()) {
        *to = c_char::from_ne_bytes([from]);
    }
    libc::sockaddr {
        sa_family: libc::sa_family_t::try_from(libc::AF_INET).unwrap_or_default(),
        sa_data: data,
    }
}
