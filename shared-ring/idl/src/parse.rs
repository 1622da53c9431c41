//! Parser of the table's language.
//!
//! One declaration per line; its members follow, indented. `#` starts a comment line, `///` a line of documentation
//! for the next declaration.
//!
//! ```text
//! enum NAME                      values of a 32-bit field
//!     VALUE NAME
//! struct NAME [align BYTES]      element of an array in a tail; the alignment is that in memory
//!     NAME TYPE
//! message ID NAME KIND [next]    KIND: record | request | request blocking
//!     NAME TYPE [nonzero] [example VALUE...]
//!     tail NAME ELEMENT max N [example TEXT]
//!                                ELEMENT: bytes | a struct
//!   reply
//!     NAME TYPE [= CONSTANT]
//!     tail NAME ELEMENT max N
//!   driver FUNCTION(ARGUMENT, ...) [checked]
//! function ID NAME BODY          BODY: CLASS MESSAGE... [stream] [unified] | local returns CODE
//!                                   | same NAME | per-thread NAME | unsupported REASON...
//!     DIRECTION NAME CTYPE       DIRECTION: in | out | inout
//!     answers SYMBOL VERSION [per-thread]
//!     calls NAME
//! data NAME BYTES
//! attribute ID NAME [answers VALUE REASON...]
//! constants NAME TYPE [PREFIX]   TYPE: u8 | u32 | i32 | u64 | usize
//!     VALUE NAME                 PREFIX: start of the names in `cuda.h`
//! result CODE NAME TEXT...
//! ```
//!
//! TYPE is `u8 u32 i32 u64 f32`, one of them with a length (`u32[3]`), `address`, a handle (`stream event
//! module library function graph pool memory array mipmap`, where a stream may be the legacy one; `minted stream` may not; `new event`
//! names one being created; `optional stream` may be absent), `fence`, `optional fence`, or an enum.
//!
//! `example`: the field's value in the message that tests send; no part of the protocol. VALUE is a number for each
//! element of an array, the name of an enum's value, or the method of the tests' `Source` that gives an address, a handle
//! or a fence. Without one, numbers are 0 (1 where `nonzero`), optional fields are absent and tails are empty.
//!
//! `driver`: one call of this driver function answers the message, so that the device's operation, the CUDA device's
//! implementation of it and the worker's service are generated. An ARGUMENT is a field, a field of the reply or
//! `device`, each once, or a number, in the order of the function's parameters. A new handle is a result of the call.
//! `checked`: the worker's service is written by hand, since it checks the message first or enters an object.
//!
//! CLASS is `local record request fence`. `stream`: the function depends on the default stream, and may have
//! a `per-thread` variant. `unified`: a `CUdeviceptr` of the function may be memory of the program's own. CTYPE is
//! a C type passed by value (`in`) or pointed at (`out`, `inout`); with `[LENGTH]` it is pointed at in any
//! direction. LENGTH is a number, the name of a parameter, or nothing where only the function knows. `string` is
//! NUL-terminated. `returns`: always this code, and its results, the only parameters that it has, are zero. `calls`: that
//! function serves this one; it has all parameters of this one, and those that this one lacks are null or 0.

mod driver;
mod functions;

use crate::code::check_name;
use crate::table::{
    Attribute, Body, Constant, Constants, Data, Enum, Field, FieldType, Handle, Kind, Message,
    ResultCode, Scalar, Struct, Table, Tail,
};

/// Reason why a table could not be parsed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("line {line}: {reason}")]
pub struct ParseError {
    pub line: usize,
    pub reason: String,
}

enum Open {
    Nothing,
    Enum,
    Struct,
    Constants,
    Body,
    Reply,
    Function,
}

/// Parses a table.
///
/// # Errors
/// The first line that is not in the language, or that contradicts an earlier one.
pub fn parse(text: &str) -> Result<Table, ParseError> {
    let mut parser = Parser {
        table: Table::default(),
        open: Open::Nothing,
        doc: Vec::new(),
    };
    for (index, raw) in text.lines().enumerate() {
        parser.line(raw).map_err(|reason| ParseError {
            line: index + 1,
            reason,
        })?;
    }
    parser.table.messages.sort_by_key(|message| message.id);
    let mut messages = parser.table.messages.iter();
    functions::check(&parser.table)
        .and_then(|()| messages.try_for_each(driver::check))
        .map_err(|reason| ParseError {
            line: text.lines().count(),
            reason,
        })?;
    Ok(parser.table)
}

struct Parser {
    table: Table,
    open: Open,
    doc: Vec<String>,
}

impl Parser {
    fn line(&mut self, raw: &str) -> Result<(), String> {
        let line = raw.trim();
        if let Some(doc) = line.strip_prefix("///") {
            self.doc.push(doc.trim().to_owned());
            return Ok(());
        }
        if line.is_empty() || line.starts_with('#') {
            return Ok(());
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        if raw.starts_with(' ') {
            self.member(&words)
        } else {
            self.declaration(&words)
        }
    }

    fn declaration(&mut self, words: &[&str]) -> Result<(), String> {
        let doc = std::mem::take(&mut self.doc);
        match words {
            ["enum", name] => {
                self.table.enums.push(Enum {
                    doc,
                    name: rust_name(name)?,
                    values: Vec::new(),
                });
                self.open = Open::Enum;
            }
            ["struct", name, rest @ ..] => {
                let align = match rest {
                    [] => None,
                    ["align", bytes] => Some(number(bytes)?),
                    _ => return Err(format!("{rest:?} says nothing about struct {name}")),
                };
                self.table.structs.push(Struct {
                    doc,
                    name: rust_name(name)?,
                    align,
                    fields: Vec::new(),
                });
                self.open = Open::Struct;
            }
            ["message", id, name, rest @ ..] => {
                let (kind, rest) = match rest {
                    ["record", rest @ ..] => (Kind::Record, rest),
                    ["request", "blocking", rest @ ..] => (Kind::Blocking, rest),
                    ["request", rest @ ..] => (Kind::Request, rest),
                    _ => return Err(format!("message {name} is neither a record nor a request")),
                };
                let next = match rest {
                    [] => false,
                    ["next"] => true,
                    _ => return Err(format!("{rest:?} says nothing about message {name}")),
                };
                let id = number(id)?;
                if let Some(other) = self
                    .table
                    .messages
                    .iter()
                    .find(|m| m.id == id || m.name == *name)
                {
                    return Err(format!(
                        "message {id} {name} repeats message {} {}",
                        other.id, other.name
                    ));
                }
                self.table.messages.push(Message {
                    doc,
                    id,
                    name: rust_name(name)?,
                    kind,
                    next,
                    body: Body::default(),
                    reply: Body::default(),
                    driver: None,
                });
                self.open = Open::Body;
            }
            [
                "constants",
                name,
                kind @ ("u8" | "u32" | "i32" | "u64" | "usize"),
                rest @ ..,
            ] => {
                let prefix = match rest {
                    [] => "",
                    [prefix] => prefix,
                    _ => return Err(format!("{rest:?} says nothing about constants {name}")),
                };
                if self.table.constants.iter().any(|other| other.name == *name) {
                    return Err(format!("constants {name} are declared twice"));
                }
                self.table.constants.push(Constants {
                    doc,
                    name: rust_name(name)?,
                    kind: (*kind).to_owned(),
                    prefix: prefix.to_owned(),
                    values: Vec::new(),
                });
                self.open = Open::Constants;
            }
            ["result", code, name, text @ ..] if !text.is_empty() => {
                let code = number(code)?;
                let last = self.table.results.last();
                if last.is_some_and(|last| last.code >= code) {
                    return Err(format!("result {code} {name} does not rise"));
                }
                self.table.results.push(ResultCode {
                    code,
                    name: rust_name(name)?,
                    text: text.join(" "),
                });
                self.open = Open::Nothing;
            }
            ["function", id, name, rest @ ..] => {
                let function = functions::declaration(number(id)?, name, rest, doc)?;
                self.table.functions.push(function);
                self.open = Open::Function;
            }
            ["data", name, bytes] => {
                self.table.data.push(Data {
                    name: rust_name(name)?,
                    bytes: number(bytes)?,
                });
                self.open = Open::Nothing;
            }
            ["attribute", id, name, rest @ ..] => {
                let answers = match rest {
                    [] => None,
                    ["answers", value, reason @ ..] if !reason.is_empty() => {
                        Some((number(value)?, reason.join(" ")))
                    }
                    _ => return Err(format!("{rest:?} says nothing about attribute {name}")),
                };
                let id = number(id)?;
                if self
                    .table
                    .attributes
                    .iter()
                    .any(|other| other.id == id || other.name == *name)
                {
                    return Err(format!("attribute {id} {name} is declared twice"));
                }
                self.table.attributes.push(Attribute {
                    id,
                    name: rust_name(name)?,
                    answers,
                });
                self.open = Open::Nothing;
            }
            _ => return Err(format!("{words:?} declares nothing")),
        }
        Ok(())
    }

    fn member(&mut self, words: &[&str]) -> Result<(), String> {
        let doc = std::mem::take(&mut self.doc);
        match self.open {
            Open::Nothing => Err("an indented line before any declaration".to_owned()),
            Open::Enum => {
                let [value, name] = words else {
                    return Err(format!("{words:?} is not a value and its name"));
                };
                let value = number(value)?;
                let target = self.table.enums.last_mut().ok_or("no enum is open")?;
                target.values.push((value, rust_name(name)?));
                Ok(())
            }
            Open::Constants => {
                let [value, name] = words else {
                    return Err(format!("{words:?} is not a value and its name"));
                };
                let value = number(value)?;
                let target = self.table.constants.last_mut();
                let target = target.ok_or("no constants are open")?;
                target.values.push(Constant {
                    doc,
                    value,
                    name: rust_name(name)?,
                });
                Ok(())
            }
            Open::Struct => {
                let field = self.field(words, doc)?;
                if !matches!(field.kind, FieldType::Scalar(_) | FieldType::Array(..)) {
                    return Err(format!("field {} of a struct must be a number", field.name));
                }
                self.table
                    .structs
                    .last_mut()
                    .ok_or("no struct is open")?
                    .fields
                    .push(field);
                Ok(())
            }
            Open::Function => functions::member(
                self.table
                    .functions
                    .last_mut()
                    .ok_or("no function is open")?,
                words,
            ),
            Open::Body | Open::Reply => self.message_member(words, doc),
        }
    }

    fn message_member(&mut self, words: &[&str], doc: Vec<String>) -> Result<(), String> {
        if words == ["reply"] {
            self.open = Open::Reply;
            return Ok(());
        }
        if let ["driver", call @ ..] = words {
            let message = self.table.messages.last_mut().ok_or("no message is open")?;
            if message.driver.replace(driver::call(call)?).is_some() {
                return Err(format!("message {} calls the driver twice", message.name));
            }
            return Ok(());
        }
        if let ["tail", name, element, "max", max, rest @ ..] = words {
            let example = match (*element, rest) {
                (_, []) => String::new(),
                ("bytes", ["example", text]) => (*text).to_owned(),
                _ => return Err(format!("{rest:?} says nothing about tail {name}")),
            };
            let element = match *element {
                "bytes" => None,
                name if self.table.structs.iter().any(|s| s.name == name) => Some(name.to_owned()),
                name => {
                    return Err(format!(
                        "{name} is neither bytes nor a struct declared above"
                    ));
                }
            };
            let tail = Tail {
                doc,
                name: rust_name(name)?,
                element,
                max: number(max)?,
                example,
            };
            self.body()?.tails.push(tail);
            return Ok(());
        }
        let field = self.field(words, doc)?;
        let body = self.body()?;
        if !body.tails.is_empty() {
            return Err(format!("field {} stands behind a tail", field.name));
        }
        body.fields.push(field);
        Ok(())
    }

    fn body(&mut self) -> Result<&mut Body, String> {
        let message = self.table.messages.last_mut().ok_or("no message is open")?;
        Ok(if matches!(self.open, Open::Reply) {
            &mut message.reply
        } else {
            &mut message.body
        })
    }

    fn field(&self, words: &[&str], doc: Vec<String>) -> Result<Field, String> {
        let [name, words @ ..] = words else {
            return Err("a field needs a name".to_owned());
        };
        let (kind, rest) = self.field_type(words)?;
        let (nonzero, rest) = match rest {
            ["nonzero", rest @ ..] => (true, rest),
            _ => (false, rest),
        };
        let (constant, example) = match rest {
            [] => (None, Vec::new()),
            ["=", constant] if !nonzero => (Some(rust_name(constant)?), Vec::new()),
            ["example", values @ ..] if matches!(self.open, Open::Body) => {
                (None, example(name, &kind, values)?)
            }
            _ => return Err(format!("{rest:?} says nothing about field {name}")),
        };
        Ok(Field {
            doc,
            name: rust_name(name)?,
            kind,
            nonzero,
            constant,
            example,
        })
    }

    fn field_type<'w>(&self, words: &'w [&'w str]) -> Result<(FieldType, &'w [&'w str]), String> {
        let handle =
            |word: &str| Handle::parse(word).ok_or_else(|| format!("{word} is not a handle"));
        Ok(match words {
            ["address", rest @ ..] => (FieldType::Address, rest),
            ["fence", rest @ ..] => (FieldType::Fence, rest),
            ["optional", "fence", rest @ ..] => (FieldType::OptionalFence, rest),
            ["optional", word, rest @ ..] => (FieldType::OptionalHandle(handle(word)?), rest),
            ["new" | "minted", word, rest @ ..] => (FieldType::Minted(handle(word)?), rest),
            [word, rest @ ..] => {
                let kind = if let Some(scalar) = Scalar::parse(word) {
                    FieldType::Scalar(scalar)
                } else if let Some((scalar, count)) = array(word) {
                    FieldType::Array(scalar, count)
                } else if let Some(handle) = Handle::parse(word) {
                    FieldType::Handle(handle)
                } else if self.table.enums.iter().any(|e| e.name == *word) {
                    FieldType::Enum((*word).to_owned())
                } else {
                    return Err(format!("{word} is not a type"));
                };
                (kind, rest)
            }
            [] => return Err("a field needs a type".to_owned()),
        })
    }
}

/// Checks the values of an example: one name, or at most as many numbers as the field has elements.
fn example(field: &str, kind: &FieldType, values: &[&str]) -> Result<Vec<String>, String> {
    let count = match kind {
        FieldType::Array(_, count) => *count,
        _ => 1,
    };
    let numbers = values.len() <= count && values.iter().all(|word| word.parse::<f32>().is_ok());
    let name = matches!(values, [name] if check_name(name).is_ok());
    if values.is_empty() || !(numbers || name) {
        return Err(format!("{values:?} is no example of field {field}"));
    }
    Ok(values.iter().map(|word| (*word).to_owned()).collect())
}

fn array(word: &str) -> Option<(Scalar, usize)> {
    let (scalar, count) = word.strip_suffix(']')?.split_once('[')?;
    Some((Scalar::parse(scalar)?, count.parse().ok()?))
}

/// Checks a word that generated code uses as an identifier.
fn rust_name(word: &str) -> Result<String, String> {
    check_name(word).map(|()| word.to_owned())
}

fn number<N: std::str::FromStr>(word: &str) -> Result<N, String> {
    word.parse()
        .map_err(|_| format!("{word} is not a number that fits"))
}
