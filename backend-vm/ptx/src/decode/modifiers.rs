//! Modifiers: the dotted parts of an opcode.

use super::Reject;
use crate::alu::half::Rounding;
use crate::parse::ast::Type;

/// Modifiers of one instruction. Decoding removes each one that it has interpreted.
#[derive(Debug)]
pub(crate) struct Modifiers<'a> {
    parts: Vec<Option<&'a str>>,
}

impl<'a> Modifiers<'a> {
    /// Splits an opcode into its name and modifiers.
    pub(crate) fn split(opcode: &'a str) -> (&'a str, Self) {
        let mut parts = opcode.split('.');
        let name = parts.next().unwrap_or("");
        (
            name,
            Self {
                parts: parts.map(Some).collect(),
            },
        )
    }

    /// Removes `name`, and returns whether it was present.
    pub(crate) fn take(&mut self, name: &str) -> bool {
        match self.parts.iter_mut().find(|part| **part == Some(name)) {
            Some(part) => {
                *part = None;
                true
            }
            None => false,
        }
    }

    /// Removes the first modifier that `accept` maps to a value, and returns the value.
    pub(crate) fn take_map<T>(&mut self, accept: impl Fn(&'a str) -> Option<T>) -> Option<T> {
        for part in &mut self.parts {
            if let Some(value) = part.and_then(&accept) {
                *part = None;
                return Some(value);
            }
        }
        None
    }

    /// Removes the first remaining modifier.
    pub(crate) fn first(&mut self) -> Option<&'a str> {
        self.parts.iter_mut().find_map(Option::take)
    }

    /// Removes every modifier that `ignore` accepts.
    pub(crate) fn ignore(&mut self, ignore: impl Fn(&str) -> bool) {
        for part in &mut self.parts {
            if part.is_some_and(&ignore) {
                *part = None;
            }
        }
    }

    /// Removes the last modifier, which must be a type.
    pub(crate) fn ty(&mut self) -> Result<Type, Reject> {
        let part = self
            .parts
            .iter_mut()
            .rev()
            .find(|part| part.is_some())
            .ok_or(Reject::Unsupported)?;
        let ty = part.and_then(Type::named).ok_or(Reject::Unsupported)?;
        *part = None;
        Ok(ty)
    }

    /// Removes the length of a vector.
    pub(crate) fn vector(&mut self) -> Option<usize> {
        self.take_map(|part| match part {
            "v2" => Some(2),
            "v4" => Some(4),
            "v8" => Some(8),
            _ => None,
        })
    }

    /// Removes a rounding mode of arithmetic.
    pub(crate) fn rounding(&mut self) -> Option<Rounding> {
        self.take_map(|part| match part {
            "rn" => Some(Rounding::Nearest),
            "rz" => Some(Rounding::Zero),
            "rm" => Some(Rounding::Down),
            "rp" => Some(Rounding::Up),
            _ => None,
        })
    }

    /// Removes a rounding mode to integers.
    pub(crate) fn integral_rounding(&mut self) -> Option<Rounding> {
        self.take_map(|part| match part {
            "rni" => Some(Rounding::Nearest),
            "rzi" => Some(Rounding::Zero),
            "rmi" => Some(Rounding::Down),
            "rpi" => Some(Rounding::Up),
            _ => None,
        })
    }

    /// Fails if any modifier remains.
    pub(crate) fn finish(&self) -> Result<(), Reject> {
        if self.parts.iter().any(Option::is_some) {
            Err(Reject::Unsupported)
        } else {
            Ok(())
        }
    }
}
