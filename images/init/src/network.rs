//! Describes the network of a guest's interface: `address=10.0.0.2/24,gateway=10.0.0.1,dns=10.0.0.1`.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// Network of an interface. The gateway is another host of the interface's network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    address: Ipv4Addr,
    prefix: u8,
    gateway: Option<Ipv4Addr>,
    dns: Option<Ipv4Addr>,
}

/// Error from parsing a network.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NetworkError {
    #[error("{0:?} is no field of a network")]
    Field(String),
    #[error("the field {0} is there twice")]
    Twice(&'static str),
    #[error("the guest's address is missing: add address=10.0.0.2/24, for example")]
    NoAddress,
    #[error(
        "{0:?} is no address of a guest's interface: write an IPv4 address and the length of its prefix, 1 to 30, such \
         as 10.0.0.2/24"
    )]
    Address(String),
    #[error(
        "{address}/{prefix} is the address of a whole network or of all its hosts, not a guest's"
    )]
    NoHost { address: Ipv4Addr, prefix: u8 },
    #[error("{value:?} is no IPv4 address for {field}")]
    Ipv4 { field: &'static str, value: String },
    #[error("the gateway {gateway} is no other host in the network of {address}/{prefix}")]
    Gateway {
        gateway: Ipv4Addr,
        address: Ipv4Addr,
        prefix: u8,
    },
}

impl Network {
    /// Returns the address of the interface.
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    /// Returns the mask of the interface's network.
    pub fn mask(&self) -> Ipv4Addr {
        mask(self.prefix)
    }

    /// Returns the next hop of the default route.
    pub fn gateway(&self) -> Option<Ipv4Addr> {
        self.gateway
    }

    /// Returns the name server.
    pub fn dns(&self) -> Option<Ipv4Addr> {
        self.dns
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "address={}/{}", self.address, self.prefix)?;
        for (field, address) in [("gateway", self.gateway), ("dns", self.dns)] {
            if let Some(address) = address {
                write!(f, ",{field}={address}")?;
            }
        }
        Ok(())
    }
}

impl FromStr for Network {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<Self, NetworkError> {
        let (mut address, mut gateway, mut dns) = (None, None, None);
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let is_first = match part.split_once('=') {
                Some(("address", value)) => address.replace(host(value)?).is_none(),
                Some(("gateway", value)) => gateway.replace(ipv4("gateway", value)?).is_none(),
                Some(("dns", value)) => dns.replace(ipv4("dns", value)?).is_none(),
                _ => return Err(NetworkError::Field(part.to_owned())),
            };
            if !is_first {
                let fields = ["address", "gateway", "dns"];
                let field = fields.into_iter().find(|field| part.starts_with(field));
                return Err(NetworkError::Twice(field.unwrap_or_default()));
            }
        }
        let (address, prefix) = address.ok_or(NetworkError::NoAddress)?;
        if let Some(gateway) = gateway {
            let mask = mask(prefix);
            if gateway == address || !is_host(gateway, prefix) || gateway & mask != address & mask {
                return Err(NetworkError::Gateway {
                    gateway,
                    address,
                    prefix,
                });
            }
        }
        Ok(Self {
            address,
            prefix,
            gateway,
            dns,
        })
    }
}

/// Parses the address of a host with the length of its prefix.
fn host(text: &str) -> Result<(Ipv4Addr, u8), NetworkError> {
    let bad = || NetworkError::Address(text.to_owned());
    let (address, prefix) = text.split_once('/').ok_or_else(bad)?;
    let address: Ipv4Addr = address.parse().map_err(|_| bad())?;
    let prefix: u8 = prefix.parse().map_err(|_| bad())?;
    let is_unicast = !address.is_loopback()
        && !address.is_multicast()
        && !address.is_broadcast()
        && address.octets()[0] != 0;
    if !(1..=30).contains(&prefix) || !is_unicast {
        return Err(bad());
    }
    if !is_host(address, prefix) {
        return Err(NetworkError::NoHost { address, prefix });
    }
    Ok((address, prefix))
}

/// Returns whether the address is neither the first of its network nor the last.
fn is_host(address: Ipv4Addr, prefix: u8) -> bool {
    let hosts = !mask(prefix);
    let number = address & hosts;
    !number.is_unspecified() && number != hosts
}

fn mask(prefix: u8) -> Ipv4Addr {
    let hosts = u32::MAX.checked_shr(prefix.into()).unwrap_or(0);
    Ipv4Addr::from_bits(!hosts)
}

fn ipv4(field: &'static str, value: &str) -> Result<Ipv4Addr, NetworkError> {
    value.parse().map_err(|_| NetworkError::Ipv4 {
        field,
        value: value.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_read_as_it_is_written() {
        for text in [
            "address=10.0.0.2/24",
            "address=10.0.0.2/24,gateway=10.0.0.1",
            "address=192.168.7.6/30,gateway=192.168.7.5,dns=9.9.9.9",
        ] {
            let network: Network = text.parse().expect(text);
            assert_eq!(network.to_string(), text);
        }
        let network: Network = "dns=9.9.9.9,address=172.16.9.1/12".parse().expect("one");
        assert_eq!(network.mask(), Ipv4Addr::new(255, 240, 0, 0));
        assert_eq!(network.dns(), Some(Ipv4Addr::new(9, 9, 9, 9)));
        assert_eq!(network.gateway(), None);
    }

    #[test]
    fn networks_that_cannot_be_are_refused_by_name() {
        for (text, words) in [
            ("", "address is missing"),
            ("gateway=10.0.0.1", "address is missing"),
            ("address=10.0.0.2", "the length of its prefix"),
            ("address=10.0.0.2/31", "1 to 30"),
            ("address=10.0.0.2/0", "1 to 30"),
            ("address=10.0.0.2/x", "10.0.0.2/x"),
            ("address=10.0.0.256/24", "10.0.0.256/24"),
            ("address=fd00::2/64", "fd00::2/64"),
            ("address=127.0.0.1/8", "127.0.0.1/8"),
            ("address=224.0.0.1/8", "224.0.0.1/8"),
            ("address=0.0.0.1/8", "0.0.0.1/8"),
            (
                "address=10.0.0.0/24",
                "10.0.0.0/24 is the address of a whole",
            ),
            ("address=10.0.0.255/24", "or of all its hosts"),
            (
                "address=10.0.0.2/24,gateway=10.0.1.1",
                "10.0.1.1 is no other host",
            ),
            (
                "address=10.0.0.2/24,gateway=10.0.0.2",
                "10.0.0.2 is no other host",
            ),
            (
                "address=10.0.0.2/24,gateway=10.0.0.0",
                "10.0.0.0 is no other host",
            ),
            (
                "address=10.0.0.2/24,gateway=",
                "no IPv4 address for gateway",
            ),
            (
                "address=10.0.0.2/24,dns=localhost",
                "\"localhost\" is no IPv4",
            ),
            (
                "address=10.0.0.2/24,address=10.0.0.3/24",
                "address is there twice",
            ),
            ("address=10.0.0.2/24,speed=9", "\"speed=9\" is no field"),
            ("10.0.0.2/24", "\"10.0.0.2/24\" is no field"),
        ] {
            let error = text.parse::<Network>().expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }
}
