//! What is called: the served functions of the API table, as text.
//!
//! A line is a function and its parameters, each `name:direction:kind`, with `:length` for an array.

use std::fmt::Write as _;
use std::path::Path;

use wormhole_idl::{Direction, FunctionBody};

/// A function.
#[derive(Debug)]
pub struct Call {
    pub name: String,
    pub parameters: Vec<Parameter>,
}

/// A parameter of a function.
#[derive(Debug)]
pub struct Parameter {
    pub name: String,
    pub kind: String,
    /// The program passes its address.
    pub is_pointer: bool,
    /// The function reads what is there.
    pub is_read: bool,
    /// It says how long another one is.
    pub is_length: bool,
}

/// Not called: it ends the process's device for everything that follows in ways that are its purpose, or
/// what it returns is no code.
const LEFT_OUT: [&str; 1] = ["cuGetExportTable"];

/// The table's functions, as text.
pub fn text() -> String {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../shared-ring/api"));
    let table = wormhole_idl::load(folder).expect("the table");
    let mut text = String::new();
    for function in &table.functions {
        let FunctionBody::Forwarded(forwarded) = &function.body else {
            continue;
        };
        if LEFT_OUT.contains(&function.name.as_str()) {
            continue;
        }
        text.push_str(&function.name);
        for parameter in &forwarded.parameters {
            let direction = match parameter.direction {
                Direction::In => "in",
                Direction::Out => "out",
                Direction::InOut => "inout",
            };
            let _ = write!(text, " {}:{direction}:{}", parameter.name, parameter.kind);
            if let Some(length) = &parameter.length {
                let _ = write!(text, ":{length}");
            }
        }
        text.push('\n');
    }
    text
}

/// Reads what [`text`] wrote.
pub fn read(text: &str) -> Vec<Call> {
    text.lines().map(line).collect()
}

fn line(line: &str) -> Call {
    let mut words = line.split(' ');
    let name = words.next().expect("a function").to_owned();
    let fields: Vec<Vec<&str>> = words.map(|word| word.split(':').collect()).collect();
    let parameters = fields.iter().map(|field| Parameter {
        name: field[0].to_owned(),
        kind: field[2].to_owned(),
        is_pointer: field[1] != "in" || field.len() > 3 || field[2] == "string",
        is_read: field[1] != "out",
        is_length: fields.iter().any(|other| other.get(3) == Some(&field[0])),
    });
    Call {
        parameters: parameters.collect(),
        name,
    }
}
