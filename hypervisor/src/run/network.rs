//! `--network`: a tap interface of this machine, and the guest's address on it.

use std::io;
use std::str::FromStr;

use wormhole_images::Network;
use wormhole_monitor::{MAX_NETWORKS, MacAddress, NetConfig, Tap, TapError};

/// A network as given by `--network`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkOption {
    tap: String,
    mac: Option<MacAddress>,
    pub guest: Network,
}

/// Reason why a guest cannot have its networks.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    #[error("a guest cannot have {0} networks: at most {MAX_NETWORKS} are possible")]
    Count(usize),
    #[error("--network names the tap interface {0} twice: each network needs one of its own")]
    SameTap(String),
    #[error("--network gives the address {0} twice")]
    SameAddress(std::net::Ipv4Addr),
    #[error("two networks have a gateway, and a guest has one default route: leave one out")]
    Gateways,
    #[error(transparent)]
    Tap(#[from] TapError),
    #[error("no hardware address can be chosen")]
    Random(#[source] io::Error),
}

impl FromStr for NetworkOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mut tap, mut mac) = (None, None);
        let mut guest = Vec::new();
        for part in text.split(',') {
            let is_first = match part.split_once('=') {
                Some(("tap", name)) => tap.replace(name.to_owned()).is_none(),
                Some(("mac", address)) => {
                    let address = address.parse::<MacAddress>();
                    mac.replace(address.map_err(|error| error.to_string())?)
                        .is_none()
                }
                _ => {
                    guest.push(part);
                    true
                }
            };
            if !is_first {
                return Err("tap= and mac= can be there once".to_owned());
            }
        }
        let guest = guest.join(",").parse::<Network>();
        Ok(Self {
            guest: guest.map_err(|error| error.to_string())?,
            tap: tap.ok_or("the host's interface is missing: add tap=NAME")?,
            mac,
        })
    }
}

/// Refuses networks that a guest cannot have together.
pub fn check(networks: &[NetworkOption]) -> Result<(), NetworkError> {
    if networks.len() > MAX_NETWORKS {
        return Err(NetworkError::Count(networks.len()));
    }
    for (index, network) in networks.iter().enumerate() {
        for other in &networks[..index] {
            if network.tap == other.tap {
                return Err(NetworkError::SameTap(network.tap.clone()));
            }
            if network.guest.address() == other.guest.address() {
                return Err(NetworkError::SameAddress(network.guest.address()));
            }
            if network.guest.gateway().is_some() && other.guest.gateway().is_some() {
                return Err(NetworkError::Gateways);
            }
        }
    }
    Ok(())
}

/// Attaches to the tap interfaces. An interface without `mac=` gets a random hardware address.
pub fn open(networks: &[NetworkOption]) -> Result<Vec<NetConfig>, NetworkError> {
    let open = |network: &NetworkOption| {
        Ok(NetConfig {
            tap: Tap::open(&network.tap)?,
            mac: match network.mac {
                Some(mac) => mac,
                None => MacAddress::random().map_err(NetworkError::Random)?,
            },
        })
    };
    networks.iter().map(open).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_names_both_ends() {
        let text = "tap=tap0,address=10.0.0.2/24,mac=02:00:00:00:00:07,gateway=10.0.0.1";
        let network: NetworkOption = text.parse().expect(text);
        assert_eq!(network.tap, "tap0");
        let mac = network.mac.map(|mac| mac.to_string());
        assert_eq!(mac.as_deref(), Some("02:00:00:00:00:07"));
        let guest = network.guest.to_string();
        assert_eq!(guest, "address=10.0.0.2/24,gateway=10.0.0.1");
    }

    #[test]
    fn networks_that_cannot_be_together_are_refused() {
        let refused = |networks: &[&str], words: &str| {
            let networks: Vec<NetworkOption> = networks
                .iter()
                .map(|text| text.parse().expect(text))
                .collect();
            let error = check(&networks).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        };
        let one = "tap=a,address=10.0.0.2/24,gateway=10.0.0.1";
        refused(&[one, "tap=a,address=10.0.1.2/24"], "interface a twice");
        refused(
            &[one, "tap=b,address=10.0.0.2/24"],
            "address 10.0.0.2 twice",
        );
        let other = "tap=b,address=10.0.1.2/24,gateway=10.0.1.1";
        refused(&[one, other], "one default route");
        refused(&[one; MAX_NETWORKS + 1], "a guest cannot have");
        check(&[one.parse().expect(one)]).expect("it can be");
    }
}
