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
        arguments: arguments.map(argument_of).collect::<Result<_, _>>()?,
        checked,
    })
}

/// Parses an argument: a name or a number.
fn argument_of(word: &str) -> Result<String, String> {
    match word.parse::<u64>() {
        Ok(_) => Ok(word.to_owned()),
        Err(_) => rust_name(word),
    }
}

/// Checks that the fields of a message fit its call.
pub(super) fn check(message: &Message) -> Result<(), String> {
    let (name, Some(call)) = (&message.name, &message.driver) else {
        return Ok(());
    };
    if !message.body.tails.is_empty() || !message.reply.tails.is_empty() {
        return Err(format!("message {name} has a tail, which no argument is"));
    }
    // A generated service can find functions and pools. It checks no address and enters no new handle.
    let (mut handles, mut plain) = (0, true);
    let fields = || message.body.fields.iter().chain(&message.reply.fields);
    for field in fields() {
        match field.kind {
            FieldType::Scalar(_) => {}
            FieldType::Handle(Handle::Function | Handle::Pool) => handles += 1,
            FieldType::Address | FieldType::Handle(_) | FieldType::Minted(_) => plain = false,
            _ => {
                return Err(format!(
                    "{} of message {name} is no number, address or handle",
                    field.name
                ));
            }
        }
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
        let stands = argument == DEVICE || argument.parse::<u64>().is_ok();
        if !stands && !fields().any(|field| field.name == *argument) {
            return Err(format!(
                "message {name} has no {argument} for {}",
                call.function
            ));
        }
    }
    if !call.checked && (message.kind != Kind::Blocking || handles > 1 || !plain) {
        return Err(format!(
            "message {name} must be blocking and name at most one function or pool and nothing else but numbers, or be checked"
        ));
    }
    Ok(())
}
