//! `wormhole stats`: the usage of a backend by each of its tenants.

use std::io::{self, IsTerminal};
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use wormhole_link::usage::TenantUsage;

use crate::backends::{self, BackendsError, Chosen, Client};
use crate::guests;
use crate::say;
use crate::table::{self, Column};

#[derive(Debug, Args)]
pub struct Options {
    /// The backend: its name, or `unix:` and the path of its socket.
    #[arg(default_value = backends::DEFAULT)]
    backend: Chosen,
    /// Seconds between two tables on a terminal.
    #[arg(long, value_name = "SECONDS", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// Write one table, also on a terminal.
    #[arg(long, conflicts_with = "interval")]
    once: bool,
    /// Write one JSON object.
    #[arg(long, conflicts_with = "interval")]
    json: bool,
}

/// Moves the cursor to the first line and clears the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// A tenant, with the name of its guest if that is one of `wormhole guest`.
#[derive(Debug, Serialize)]
struct Tenant {
    guest: Option<String>,
    /// Nanoseconds within which half of the requests were answered, and 99 of 100.
    request_p50_ns: Option<u64>,
    request_p99_ns: Option<u64>,
    #[serde(flatten)]
    usage: TenantUsage,
}

impl Tenant {
    fn of(guest: Option<String>, usage: TenantUsage) -> Self {
        Self {
            guest,
            request_p50_ns: usage.usage.times.quantile(50),
            request_p99_ns: usage.usage.times.quantile(99),
            usage,
        }
    }
}

/// The answer of a backend.
#[derive(Debug, Serialize)]
struct Stats {
    backend: String,
    /// None if the backend was named by its socket.
    device: Option<String>,
    tenants: Vec<Tenant>,
    #[serde(skip)]
    up: Option<String>,
}

/// Shows the usage once, or until a signal ends this process.
pub fn run(options: &Options) -> Result<(), BackendsError> {
    let client = Client::connect(&options.backend)?;
    let repeats = !options.once && !options.json && io::stdout().is_terminal();
    loop {
        let stats = Stats::of(&options.backend, client.ask()?)?;
        let text = match options.json {
            true => serde_json::to_string_pretty(&stats).unwrap_or_default(),
            false => stats.text(),
        };
        let clear = if repeats { CLEAR } else { "" };
        say::result(format_args!("{clear}{}", text.trim_end()));
        if !repeats {
            return Ok(());
        }
        std::thread::sleep(Duration::from_secs(options.interval));
    }
}

impl Stats {
    fn of(chosen: &Chosen, usages: Vec<TenantUsage>) -> Result<Self, BackendsError> {
        let entry = match chosen {
            Chosen::Socket(_) => None,
            Chosen::Name(name) => backends::entries()?
                .into_iter()
                .find(|entry| entry.name == name.as_str()),
        };
        let (device, up) = entry.map(|entry| (entry.device, entry.up)).unzip();
        // Without a list of guests, tenants have no names.
        let guests = guests::entries().unwrap_or_default();
        let name_of = |process: i32| {
            let is_it = |guest: &&guests::Entry| {
                guest.end.is_none() && i32::try_from(guest.pid) == Ok(process)
            };
            guests.iter().find(is_it).map(|guest| guest.name.clone())
        };
        let tenants = usages
            .into_iter()
            .map(|usage| Tenant::of(name_of(usage.process), usage));
        Ok(Self {
            backend: chosen.to_string(),
            device,
            tenants: tenants.collect(),
            up,
        })
    }

    fn text(&self) -> String {
        let rows: Vec<_> = self
            .tenants
            .iter()
            .map(|tenant| {
                let Tenant {
                    guest, usage: of, ..
                } = tenant;
                let late = if of.is_current { "" } else { "*" };
                let usage = &of.usage;
                [
                    format!("{late}{}", of.tenant),
                    of.user.to_string(),
                    of.process.to_string(),
                    guest.clone().unwrap_or_else(|| "-".to_owned()),
                    usage.sessions.to_string(),
                    usage.local_calls.to_string(),
                    usage.records.to_string(),
                    usage.requests.to_string(),
                    table::time(tenant.request_p50_ns),
                    table::time(tenant.request_p99_ns),
                    usage.launches.to_string(),
                    usage.graph_launches.to_string(),
                    table::bytes(usage.bytes_to_device),
                    table::bytes(usage.bytes_from_device),
                    table::bytes(usage.device_memory),
                    table::number(usage.vm_exits),
                ]
            })
            .collect();
        let mut text = format!("backend {}", self.backend);
        if let (Some(device), Some(up)) = (&self.device, &self.up) {
            text.push_str(&format!(" on {device}, up {up}"));
        }
        text.push('\n');
        text.push_str(&table::format(
            [
                Column::Number("TENANT"),
                Column::Number("USER"),
                Column::Number("PID"),
                Column::Text("GUEST"),
                Column::Number("SESSIONS"),
                Column::Number("LOCAL"),
                Column::Number("RECORDS"),
                Column::Number("REQUESTS"),
                Column::Number("P50"),
                Column::Number("P99"),
                Column::Number("LAUNCHES"),
                Column::Number("GRAPHS"),
                Column::Number("TO-DEV"),
                Column::Number("FROM-DEV"),
                Column::Number("DEV-MEM"),
                Column::Number("EXITS"),
            ],
            &rows,
        ));
        if self.tenants.iter().any(|tenant| !tenant.usage.is_current) {
            text.push_str("* has not answered in time: these are its last figures\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use wormhole_link::counters::TIMES;
    use wormhole_link::usage::Usage;

    use super::*;

    fn stats() -> Stats {
        let mut times = [0; TIMES];
        (times[3], times[13]) = (60, 7);
        let busy = TenantUsage {
            tenant: 3,
            user: 1000,
            process: 4711,
            seconds: 9,
            is_current: true,
            usage: Usage {
                sessions: 1,
                local_calls: 20,
                records: 12345,
                requests: 67,
                launches: 890,
                graph_launches: 4,
                bytes_to_device: 3 << 19,
                bytes_from_device: 100,
                device_memory: 1 << 30,
                times: serde_json::from_value(times.into()).expect("numbers"),
                vm_exits: Some(5),
                ..Usage::default()
            },
        };
        let late = TenantUsage {
            tenant: 14,
            ..TenantUsage::default()
        };
        let tenant = |guest: Option<&str>, usage| Tenant::of(guest.map(str::to_owned), usage);
        Stats {
            backend: "gpu".to_owned(),
            device: Some("cuda:0".to_owned()),
            tenants: vec![tenant(Some("debian"), busy), tenant(None, late)],
            up: Some("59s".to_owned()),
        }
    }

    #[test]
    fn each_tenant_has_a_line() {
        let text = "\
backend gpu on cuda:0, up 59s
TENANT  USER   PID  GUEST   SESSIONS  LOCAL  RECORDS  REQUESTS  P50  P99  LAUNCHES  GRAPHS  TO-DEV  FROM-DEV  DEV-MEM  EXITS
     3  1000  4711  debian         1     20    12345        67  3us  3ms       890       4    1.5M       100       1G      5
   *14     0     0  -              0      0        0         0    -    -         0       0       0         0        0      -
* has not answered in time: these are its last figures
";
        assert_eq!(stats().text(), text);
    }

    #[test]
    fn json_has_exact_numbers_by_tenant() {
        let json = serde_json::to_value(stats()).unwrap();
        assert_eq!(json["backend"], "gpu");
        assert_eq!(json["device"], "cuda:0");
        let [busy, late] = [0, 1].map(|at| &json["tenants"][at]);
        assert_eq!(busy["guest"], "debian");
        assert_eq!(busy["tenant"], 3);
        assert_eq!(busy["bytes_to_device"], 3 << 19);
        assert_eq!(busy["vm_exits"], 5);
        assert_eq!(busy["request_p50_ns"], 2048);
        assert_eq!(busy["request_p99_ns"], 1 << 21);
        assert_eq!(busy["is_current"], true);
        assert!(late["vm_exits"].is_null() && late["guest"].is_null());
        assert!(late["request_p99_ns"].is_null());
        let read: TenantUsage = serde_json::from_value(busy.clone()).unwrap();
        assert_eq!(read, stats().tenants[0].usage);
    }
}
