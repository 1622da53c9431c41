//! Generates the page that lists the served functions of the driver API.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::table::{Class, Forwarded, Function, FunctionBody, Table};
use crate::tested::Tested;

/// Generates the coverage page, in Markdown.
#[must_use]
pub fn coverage(table: &Table, tested: &Tested) -> String {
    let mut out = String::from(
        "# The driver API: functions that are served\n\nGenerated from `shared-ring/api/driver.idl` and `tested.txt`: `cargo run -p wormhole-idl --example coverage > docs/api-coverage.md`.\n\n",
    );
    summary(&mut out, table);
    served(&mut out, table, tested);
    unsupported(&mut out, table);
    attributes(&mut out, table);
    messages(&mut out, table);
    out
}

fn summary(out: &mut String, table: &Table) {
    let count = |class: Class| {
        let of_class = |function: &&Function| {
            table
                .forwarded(function)
                .is_some_and(|(_, forwarded)| forwarded.class == class)
        };
        table.functions.iter().filter(of_class).count()
    };
    let classes = [
        (Class::Local, "local", "answered in the guest"),
        (Class::Record, "record", "written to the ring and forgotten"),
        (
            Class::Request,
            "request",
            "answered by the worker, at least the first time",
        ),
        (
            Class::Fence,
            "fence",
            "waits on a word that the device writes",
        ),
    ];
    out.push_str("| class | functions | meaning |\n|---|---|---|\n");
    let mut served = 0;
    for (class, name, meaning) in classes {
        served += count(class);
        let _ = writeln!(out, "| {name} | {} | {meaning} |", count(class));
    }
    let rest = table.functions.len() - served;
    let _ = writeln!(
        out,
        "| unsupported | {rest} | exported; returns `CUDA_ERROR_NOT_SUPPORTED` and says so once in the log |\n"
    );
    let _ = writeln!(
        out,
        "{} functions and {} variables are exported: every name of the native `libcuda.so.1`.\n",
        table.functions.len(),
        table.data.len()
    );
}

fn served(out: &mut String, table: &Table, tested: &Tested) {
    out.push_str("## Served\n\n\"Symbol\" and \"since\" are arguments of `cuGetProcAddress`. \"Tested by\" is a test that fails when the function returns success and does nothing (`cargo xtask mutants`).\n\n| function | symbol | since | class | messages | tested by |\n|---|---|---|---|---|---|\n");
    for function in &table.functions {
        let Some((base, forwarded)) = table.forwarded(function) else {
            continue;
        };
        let (symbol, since) = match &function.answers {
            Some(answers) => {
                let variant = if answers.per_thread {
                    ", per thread"
                } else {
                    ""
                };
                (
                    format!("{}{variant}", answers.symbol),
                    version(answers.since),
                )
            }
            None => (String::new(), String::new()),
        };
        let class = match &function.body {
            FunctionBody::Same(_) => format!("as {}", base.name),
            FunctionBody::Forwarded(Forwarded {
                returns: Some(code),
                ..
            }) => format!("returns {code}"),
            _ => forwarded.class.name().to_lowercase(),
        };
        let _ = writeln!(
            out,
            "| {} | {symbol} | {since} | {class} | {} | {} |",
            function.name,
            forwarded.messages.join(", "),
            tested.by(&function.name).unwrap_or_default()
        );
    }
    out.push('\n');
}

/// Formats a CUDA version: 12080 is CUDA 12.8.
fn version(number: u32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

fn unsupported(out: &mut String, table: &Table) {
    let mut reasons: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for function in &table.functions {
        if let FunctionBody::Unsupported(reason) = &function.body {
            reasons.entry(reason).or_default().push(&function.name);
        }
    }
    out.push_str("## Not supported\n\n");
    for (reason, names) in reasons {
        let _ = writeln!(out, "- {reason}: {}.", names.join(", "));
    }
    out.push('\n');
}

fn attributes(out: &mut String, table: &Table) {
    out.push_str("## Device attributes that are not the device's own\n\nOther attributes have the device's own values.\n\n| attribute | id | value in a guest | reason |\n|---|---|---|---|\n");
    for attribute in &table.attributes {
        if let Some((value, reason)) = &attribute.answers {
            let _ = writeln!(
                out,
                "| {} | {} | {value} | {reason} |",
                attribute.name, attribute.id
            );
        }
    }
    out.push('\n');
}

fn messages(out: &mut String, table: &Table) {
    out.push_str("## Messages\n\n| id | message | kind | sent by |\n|---|---|---|---|\n");
    for message in table.protocol(false) {
        let senders: Vec<&str> = table
            .functions
            .iter()
            .filter(|function| match &function.body {
                FunctionBody::Forwarded(forwarded) => forwarded.messages.contains(&message.name),
                _ => false,
            })
            .map(|function| function.name.as_str())
            .collect();
        let _ = writeln!(
            out,
            "| {} | {} | {} | {} |",
            message.id,
            message.name,
            message.kind.words(),
            senders.join(", ")
        );
    }
}
