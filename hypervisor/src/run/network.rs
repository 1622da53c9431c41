//! `--network`: a tap interface of this machine and the guest's address on it, or passt.

use std::fmt;
use std::io;
use std::os::fd::AsFd;
use std::str::FromStr;

use wormhole_images::{MachineNetwork, Network, NetworkEnd};
use wormhole_monitor::{HostEnd, MAX_NETWORKS, MacAddress, NetConfig, Tap, TapError};

use super::passt::{self, Passt, PasstError};

/// The host's end of a guest's network.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Tap(String),
    Passt,
}

/// An end and the guest's hardware address, `tap=NAME[,mac=MAC]` or `passt[,mac=MAC]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndOption {
    end: End,
    mac: Option<MacAddress>,
}

/// An interface of the machine that is the emulated host, and the hardware address of the guest's behind it.
#[derive(Debug)]
pub struct Bridged {
    end: BridgedEnd,
    pub mac: MacAddress,
}

#[derive(Debug)]
enum BridgedEnd {
    Tap(Tap),
    Passt(Passt),
}

/// A network as given by `--network` of `run`: the host's end and the guest's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkOption {
    host: EndOption,
    pub guest: Network,
}

const NO_END: &str = "the host's interface is missing: add tap=NAME, or write passt";

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
    #[error("--network names passt twice: a guest can have one network by it")]
    SamePasst,
    #[error(transparent)]
    Tap(#[from] TapError),
    #[error(transparent)]
    Passt(#[from] PasstError),
    #[error("no hardware address can be chosen")]
    Random(#[source] io::Error),
}

impl EndOption {
    /// Parses the fields of the host's end, and returns the others beside it.
    fn among(text: &str) -> Result<(Option<Self>, Vec<&str>), String> {
        let (mut end, mut mac) = (None, None);
        let mut others = Vec::new();
        for part in text.split(',') {
            let is_first = match part.split_once('=') {
                Some(("tap", name)) => end.replace(End::Tap(name.to_owned())).is_none(),
                None if part == "passt" => end.replace(End::Passt).is_none(),
                Some(("mac", address)) => {
                    let address = address.parse::<MacAddress>();
                    mac.replace(address.map_err(|error| error.to_string())?)
                        .is_none()
                }
                _ => {
                    others.push(part);
                    true
                }
            };
            if !is_first {
                return Err("tap= or passt, and mac=, can be there once".to_owned());
            }
        }
        Ok((end.map(|end| Self { end, mac }), others))
    }

    /// Returns the hardware address of the guest's end: a random one without `mac=`.
    fn mac(&self) -> Result<MacAddress, NetworkError> {
        let random = || MacAddress::random().map_err(NetworkError::Random);
        self.mac.map_or_else(random, Ok)
    }

    /// Returns the end with the hardware address of the guest's.
    pub fn with_mac(&self, mac: MacAddress) -> Self {
        Self {
            end: self.end.clone(),
            mac: Some(mac),
        }
    }

    /// Attaches to the tap interface, or prepares passt.
    fn bridged(&self) -> Result<Bridged, NetworkError> {
        let mac = self.mac()?;
        let end = match &self.end {
            End::Tap(name) => BridgedEnd::Tap(Tap::open(name)?),
            End::Passt => BridgedEnd::Passt(Passt::new(mac)?),
        };
        Ok(Bridged { end, mac })
    }

    /// Attaches to the tap interface, or starts passt.
    fn open(&self) -> Result<NetConfig, NetworkError> {
        let Bridged { end, mac } = self.bridged()?;
        let end: Box<dyn HostEnd> = match end {
            BridgedEnd::Tap(tap) => Box::new(tap),
            BridgedEnd::Passt(passt) => Box::new(passt.end()?),
        };
        Ok(NetConfig { end, mac })
    }
}

impl Bridged {
    /// Describes the machine's own interface, whose hardware address is another one.
    pub fn of_machine(&self) -> Result<MachineNetwork<'_>, NetworkError> {
        let mac = MacAddress::random().map_err(NetworkError::Random)?;
        Ok(MachineNetwork {
            end: match &self.end {
                BridgedEnd::Tap(tap) => NetworkEnd::Tap(tap.as_fd()),
                BridgedEnd::Passt(passt) => NetworkEnd::Stream("passt", passt),
            },
            mac: mac.to_string(),
        })
    }
}

impl fmt::Display for EndOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.end {
            End::Tap(name) => write!(f, "tap={name}")?,
            End::Passt => f.write_str("passt")?,
        }
        self.mac.map_or(Ok(()), |mac| write!(f, ",mac={mac}"))
    }
}

impl FromStr for EndOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (host, others) = Self::among(text)?;
        match others.first() {
            None => host.ok_or_else(|| NO_END.to_owned()),
            Some(other) => Err(format!("{other:?} is neither tap=NAME, passt nor mac=MAC")),
        }
    }
}

impl FromStr for NetworkOption {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (host, fields) = EndOption::among(text)?;
        let host = host.ok_or(NO_END);
        let fields = match (&host, fields.first()) {
            (
                Ok(EndOption {
                    end: End::Passt, ..
                }),
                Some(field),
            ) => {
                return Err(format!(
                    "passt gives the guest its address, gateway and name server: leave {field:?} out"
                ));
            }
            (
                Ok(EndOption {
                    end: End::Passt, ..
                }),
                None,
            ) => passt::NETWORK.to_owned(),
            _ => fields.join(","),
        };
        let guest = fields.parse::<Network>();
        Ok(Self {
            guest: guest.map_err(|error| error.to_string())?,
            host: host?,
        })
    }
}

/// Refuses interfaces that a guest cannot have together.
pub fn check_ends<'a>(ends: impl IntoIterator<Item = &'a EndOption>) -> Result<(), NetworkError> {
    let ends: Vec<&End> = ends.into_iter().map(|one| &one.end).collect();
    if ends.len() > MAX_NETWORKS {
        return Err(NetworkError::Count(ends.len()));
    }
    for (index, end) in ends.iter().enumerate() {
        if ends[..index].contains(end) {
            return Err(match end {
                End::Tap(name) => NetworkError::SameTap(name.clone()),
                End::Passt => NetworkError::SamePasst,
            });
        }
    }
    Ok(())
}

/// Refuses networks that a guest cannot have together.
pub fn check(networks: &[NetworkOption]) -> Result<(), NetworkError> {
    check_ends(networks.iter().map(|network| &network.host))?;
    for (index, network) in networks.iter().enumerate() {
        for other in &networks[..index] {
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

/// Opens the host's ends of a guest's networks.
pub fn open(networks: &[NetworkOption]) -> Result<Vec<NetConfig>, NetworkError> {
    networks.iter().map(|network| network.host.open()).collect()
}

/// Opens the host's ends for the machine that is the emulated host.
pub fn bridged(networks: &[NetworkOption]) -> Result<Vec<Bridged>, NetworkError> {
    let bridged = |network: &NetworkOption| network.host.bridged();
    networks.iter().map(bridged).collect()
}

/// Opens the host's ends for a guest that sets its addresses itself.
pub fn open_ends(ends: &[EndOption]) -> Result<Vec<NetConfig>, NetworkError> {
    ends.iter().map(EndOption::open).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_names_both_ends() {
        let text = "tap=tap0,address=10.0.0.2/24,mac=02:00:00:00:00:07,gateway=10.0.0.1";
        let network: NetworkOption = text.parse().expect(text);
        assert_eq!(network.host.end, End::Tap("tap0".to_owned()));
        let mac = network.host.mac.map(|mac| mac.to_string());
        assert_eq!(mac.as_deref(), Some("02:00:00:00:00:07"));
        let guest = network.guest.to_string();
        assert_eq!(guest, "address=10.0.0.2/24,gateway=10.0.0.1");
    }

    #[test]
    fn passt_brings_its_own_network() {
        let network: NetworkOption = "passt,mac=02:00:00:00:00:07".parse().expect("passt");
        assert_eq!(network.host.end, End::Passt);
        assert!(network.host.mac.is_some());
        assert_eq!(network.guest.to_string(), passt::NETWORK);
    }

    #[test]
    fn an_end_is_written_as_it_is_read() {
        for text in ["passt", "tap=tap0", "tap=tap0,mac=02:00:00:00:00:07"] {
            let end: EndOption = text.parse().expect(text);
            assert_eq!(end.to_string(), text);
        }
        let mac = "02:00:00:00:00:07".parse().expect("a hardware address");
        let end: EndOption = "passt".parse().expect("passt");
        assert_eq!(end.with_mac(mac).to_string(), "passt,mac=02:00:00:00:00:07");
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
        refused(&["passt", "passt"], "passt twice");
        refused(&[one, "passt"], "one default route");
        let other = "tap=b,address=10.0.1.2/24,gateway=10.0.1.1";
        refused(&[one, other], "one default route");
        refused(&[one; MAX_NETWORKS + 1], "a guest cannot have");
        check(&[one.parse().expect(one)]).expect("it can be");
    }
}
