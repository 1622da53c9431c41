//! Parser of the driver API's functions.

use std::collections::HashSet;

use super::{number, rust_name};
use crate::table::{
    Answers, Class, Direction, Forwarded, Function, FunctionBody, Parameter, Table,
};

pub(super) fn declaration(
    id: u16,
    name: &str,
    words: &[&str],
    doc: Vec<String>,
) -> Result<Function, String> {
    let body = match words {
        ["same", other] => FunctionBody::Same((*other).to_owned()),
        ["per-thread", other] => FunctionBody::PerThread((*other).to_owned()),
        ["unsupported", reason @ ..] if !reason.is_empty() => {
            FunctionBody::Unsupported(reason.join(" "))
        }
        ["local", "returns", code] => FunctionBody::Forwarded(Forwarded {
            returns: Some(number(code)?),
            ..forwarded(Class::Local, &[])
        }),
        ["local", rest @ ..] => FunctionBody::Forwarded(forwarded(Class::Local, rest)),
        ["record", rest @ ..] => FunctionBody::Forwarded(forwarded(Class::Record, rest)),
        ["request", rest @ ..] => FunctionBody::Forwarded(forwarded(Class::Request, rest)),
        ["fence", rest @ ..] => FunctionBody::Forwarded(forwarded(Class::Fence, rest)),
        _ => return Err(format!("{words:?} is no class of function {name}")),
    };
    Ok(Function {
        doc,
        id,
        name: rust_name(name)?,
        body,
        answers: None,
    })
}

fn forwarded(class: Class, words: &[&str]) -> Forwarded {
    let (words, unified) = match words {
        [words @ .., "unified"] => (words, true),
        words => (words, false),
    };
    let (messages, stream) = match words {
        [messages @ .., "stream"] => (messages, true),
        messages => (messages, false),
    };
    Forwarded {
        class,
        messages: messages.iter().map(|name| (*name).to_owned()).collect(),
        stream,
        unified,
        returns: None,
        calls: None,
        parameters: Vec::new(),
    }
}

pub(super) fn member(function: &mut Function, words: &[&str]) -> Result<(), String> {
    let name = &function.name;
    match words {
        ["answers", symbol, since, rest @ ..] => {
            let per_thread = match rest {
                [] => false,
                ["per-thread"] => true,
                _ => {
                    return Err(format!(
                        "{rest:?} says nothing about what {name} answers to"
                    ));
                }
            };
            let since = number(since)?;
            let answers = Answers {
                symbol: (*symbol).to_owned(),
                per_thread,
                since,
            };
            if function.answers.replace(answers).is_some() {
                return Err(format!("{name} answers twice"));
            }
            Ok(())
        }
        ["calls", other] => {
            forwarded_body(&mut function.body, name)?.calls = Some((*other).to_owned());
            Ok(())
        }
        [direction, parameter, kind] => {
            let direction = match *direction {
                "in" => Direction::In,
                "out" => Direction::Out,
                "inout" => Direction::InOut,
                other => return Err(format!("{other} is no direction")),
            };
            let forwarded = forwarded_body(&mut function.body, name)?;
            let (kind, length) = match kind.strip_suffix(']').and_then(|kind| kind.split_once('['))
            {
                Some((kind, length)) => (kind, Some(length.to_owned())),
                None => (*kind, None),
            };
            rust_name(kind.trim_end_matches('*'))?;
            forwarded.parameters.push(Parameter {
                name: rust_name(parameter)?,
                direction,
                kind: kind.to_owned(),
                length,
            });
            Ok(())
        }
        _ => Err(format!("{words:?} says nothing about function {name}")),
    }
}

fn forwarded_body<'f>(body: &'f mut FunctionBody, name: &str) -> Result<&'f mut Forwarded, String> {
    match body {
        FunctionBody::Forwarded(forwarded) => Ok(forwarded),
        _ => Err(format!(
            "{name} takes its parameters from elsewhere, or needs none"
        )),
    }
}

/// Checks the properties that depend on the whole table.
pub(super) fn check(table: &Table) -> Result<(), String> {
    let mut ids = HashSet::new();
    let mut names = HashSet::new();
    let mut answers = HashSet::new();
    for function in &table.functions {
        let name = &function.name;
        if !ids.insert(function.id) {
            return Err(format!(
                "function id {} of {name} is used twice",
                function.id
            ));
        }
        if !names.insert(name) {
            return Err(format!("function {name} is declared twice"));
        }
        if let Some(answer) = &function.answers
            && !answers.insert(answer)
        {
            return Err(format!(
                "{name} answers to {answer:?}, and so does another function"
            ));
        }
        check_body(table, function)?;
    }
    Ok(())
}

fn check_body(table: &Table, function: &Function) -> Result<(), String> {
    let name = &function.name;
    match &function.body {
        FunctionBody::Unsupported(_) => Ok(()),
        FunctionBody::Same(other) | FunctionBody::PerThread(other) => {
            let (_, base) = table
                .forwarded(function)
                .ok_or_else(|| format!("{name} refers to {other}, which is not forwarded"))?;
            let per_thread = matches!(function.body, FunctionBody::PerThread(_));
            if per_thread && !base.stream {
                return Err(format!(
                    "{name} is per-thread, and {other} does not depend on a stream"
                ));
            }
            Ok(())
        }
        FunctionBody::Forwarded(forwarded) => {
            let results = |parameter: &Parameter| {
                parameter.direction == Direction::Out && parameter.length.is_none()
            };
            if forwarded.returns.is_some() && !forwarded.parameters.iter().all(results) {
                return Err(format!("{name} is refused: only its results are told"));
            }
            if let Some(other) = &forwarded.calls {
                let serves = |base: &Forwarded| {
                    let mut parameters = forwarded.parameters.iter();
                    base.calls.is_none()
                        && base.returns.is_none()
                        && base.stream == forwarded.stream
                        && parameters.all(|parameter| base.parameters.contains(parameter))
                };
                if !table.declared(other).is_some_and(|(_, base)| serves(base)) {
                    return Err(format!(
                        "{name} calls {other}, which does not have all its parameters"
                    ));
                }
            }
            for message in &forwarded.messages {
                if !table
                    .messages
                    .iter()
                    .any(|declared| declared.name == *message)
                {
                    return Err(format!("{name} sends {message}, which is not declared"));
                }
            }
            for parameter in &forwarded.parameters {
                let known = |length: &String| {
                    length.is_empty()
                        || length.parse::<usize>().is_ok()
                        || forwarded
                            .parameters
                            .iter()
                            .any(|other| other.name == *length)
                };
                if parameter
                    .length
                    .as_ref()
                    .is_some_and(|length| !known(length))
                {
                    return Err(format!(
                        "the length of {} of {name} is no parameter",
                        parameter.name
                    ));
                }
            }
            Ok(())
        }
    }
}
