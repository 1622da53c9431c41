//! `wormhole ps`: the backends and guests that run.

use clap::Args;
use serde::Serialize;

use crate::backends::{self, BackendsError, Client};
use crate::guests::{self, GuestsError};
use crate::say;
use crate::table::{self, Column};

#[derive(Debug, Args)]
pub struct Options {
    /// Write one JSON object.
    #[arg(long)]
    json: bool,
}

/// Reason why nothing can be listed.
#[derive(Debug, thiserror::Error)]
pub enum PsError {
    #[error(transparent)]
    Backends(#[from] BackendsError),
    #[error(transparent)]
    Guests(#[from] GuestsError),
}

/// A backend, with the numbers of its tenants and of their open sessions that this user may see. None if the backend does
/// not tell.
#[derive(Debug, Serialize)]
struct Backend {
    #[serde(flatten)]
    entry: backends::Entry,
    tenants: Option<u64>,
    sessions: Option<u64>,
}

impl From<backends::Entry> for Backend {
    fn from(entry: backends::Entry) -> Self {
        // One that ends meanwhile, or has no place for a further client, is still in the list.
        let usage = Client::connect_to(&entry).and_then(|client| client.ask());
        let usage = usage.ok();
        let tenants = usage.as_ref().map(|tenants| tenants.len() as u64);
        let sessions = usage.map(|tenants| {
            let sessions = tenants.iter().map(|tenant| tenant.usage.sessions);
            sessions.fold(0, u64::saturating_add)
        });
        Self {
            entry,
            tenants,
            sessions,
        }
    }
}

/// All that runs.
#[derive(Debug, Serialize)]
struct Running {
    backends: Vec<Backend>,
    guests: Vec<guests::Entry>,
}

/// Lists what runs.
pub fn run(options: &Options) -> Result<(), PsError> {
    let running = Running {
        backends: backends::entries()?
            .into_iter()
            .map(Backend::from)
            .collect(),
        guests: guests::entries()?,
    };
    let text = match options.json {
        true => serde_json::to_string_pretty(&running).unwrap_or_default(),
        false => running.text(),
    };
    say::result(format_args!("{}", text.trim_end()));
    Ok(())
}

impl Running {
    fn text(&self) -> String {
        let backends: Vec<_> = self
            .backends
            .iter()
            .map(|backend| {
                let entry = &backend.entry;
                [
                    entry.name.clone(),
                    entry.pid.to_string(),
                    entry.up.clone(),
                    table::number(backend.tenants),
                    table::number(backend.sessions),
                    entry.device.clone(),
                ]
            })
            .collect();
        let backends = table::format(
            [
                Column::Text("BACKEND"),
                Column::Number("PID"),
                Column::Number("UP"),
                Column::Number("TENANTS"),
                Column::Number("SESSIONS"),
                Column::Text("DEVICE"),
            ],
            &backends,
        );
        let guests = guests::text("GUEST", &self.guests);
        format!("{backends}\n{guests}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn running() -> Running {
        Running {
            backends: vec![Backend {
                entry: backends::Entry {
                    name: "gpu".to_owned(),
                    pid: 4711,
                    device: "cuda:0".to_owned(),
                    placement: Default::default(),
                    boot_id: None,
                    version: "0.1.0".to_owned(),
                    started: 1,
                    socket: "/run/wormhole/gpu/socket".into(),
                    up: "2h01m".to_owned(),
                },
                tenants: Some(2),
                sessions: None,
            }],
            guests: vec![guests::Entry {
                name: "debian".to_owned(),
                pid: 99,
                end: None,
                backend: Some("gpu".to_owned()),
                device: None,
                memory: 3 << 29,
                cpus: 2,
                version: "0.1.0".to_owned(),
                started: 1,
                socket: "/run/wormhole/.guests/debian/socket".into(),
                up: "59s".to_owned(),
            }],
        }
    }

    #[test]
    fn backends_and_guests_have_a_table_each() {
        let text = "\
BACKEND   PID     UP  TENANTS  SESSIONS  DEVICE
gpu      4711  2h01m        2         -  cuda:0

GUEST   PID   UP  CPUS  MEMORY  BACKEND  STATE
debian   99  59s     2    1.5G  gpu      running
";
        assert_eq!(running().text(), text);
    }

    #[test]
    fn json_has_both_in_one_object() {
        let json = serde_json::to_value(running()).unwrap();
        let [backend, guest] = ["backends", "guests"].map(|list| &json[list][0]);
        assert_eq!(backend["name"], "gpu");
        assert_eq!(backend["tenants"], 2);
        assert!(backend["sessions"].is_null());
        assert_eq!(guest["memory"], 3u64 << 29);
        assert!(guest["end"].is_null());
    }
}
