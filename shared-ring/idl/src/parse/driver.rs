//! Parser of `driver` lines, for messages that one driver call answers.

use super::rust_name;
use crate::table::{DriverCall, FieldType, Handle, Kind, Message};

/// Argument that stands for the message's device.
const DEVICE: &str = "device";

/// Parses the words after `driver`.
pub(super) fn call(words: &[&str]) -> Result<DriverCall, String> {
    let (words, checked) = match words {
        [words @ .., "checked"] => (words, true),
        words => (words, false),
    };
    let text = words.join(" ");
    let (function, inside) = text
        .strip_suffix(')')
        .and_then(|text| text.split_once('('))
        .ok_or_else(|| format!("{text} is no call"))?;
    let arguments = inside.split(',').map(str::trim);
    let arguments = arguments.filter(|argument| !argument.is_empty());
    Ok(DriverCall {
        function: rust_name(function)?,
        arguments: arguments.map(rust_name).collect::<Result<_, _>>()?,
        checked,
    })
}

/// Checks that the fields of a message fit its call.
pub(super) fn check(message: &Message) -> Result<(), String> {
    let (name, Some(call)) = (&message.name, &message.driver) else {
        return Ok(());
    };
    if !message.body.tails.is_empty() || !message.reply.tails.is_empty() {
        return Err(format!("message {name} has a tail, which no argument is"));
    }
    let mut handles = 0;
    let fields = || message.body.fields.iter().chain(&message.reply.fields);
    for field in fields() {
        handles += match field.kind {
            FieldType::Scalar(_) => 0,
            FieldType::Handle(Handle::Function | Handle::Pool) => 1,
            _ => {
                return Err(format!(
                    "{} of message {name} is neither a number nor a function nor a pool",
                    field.name
                ));
            }
        };
        let given = call
            .arguments
            .iter()
            .filter(|argument| **argument == field.name);
        if given.count() != 1 {
            return Err(format!(
                "message {name} does not give {} to {} once",
                field.name, call.function
            ));
        }
    }
    for argument in &call.arguments {
        if argument != DEVICE && !fields().any(|field| field.name == *argument) {
            return Err(format!(
                "message {name} has no {argument} for {}",
                call.function
            ));
        }
    }
    if !call.checked && (message.kind != Kind::Blocking || handles > 1) {
        return Err(format!(
            "message {name} must be blocking and name one object at most, or be checked"
        ));
    }
    Ok(())
}
