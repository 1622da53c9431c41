//! Green contexts. What the device has described, and the green contexts, are kept under numbers from 1 on.

use std::sync::{Arc, Weak};

use wormhole_api::{
    CuResult, GreenCreate, GreenCreateReply, GreenDescribeReply, GreenPart, GreenSplit,
    GreenSplitReply, GreenStream, Items, Outcome,
};
use wormhole_device::{CuError, Multiprocessors, RawGreen};

use super::{Answer, Call, OBJECTS, Session, to_result};
use crate::counters::Counter;
use crate::worker::objects::StreamObject;

/// A green context, and its streams. A stream must not outlive it: every question about one would be answered as
/// if the device were lost.
#[derive(Debug)]
struct Green {
    raw: RawGreen,
    streams: Vec<Weak<StreamObject>>,
}

impl Green {
    fn has_streams(&self) -> bool {
        self.streams.iter().any(|stream| stream.strong_count() != 0)
    }
}

/// What a session has of both.
#[derive(Debug, Default)]
pub(super) struct Greens {
    parts: Vec<Multiprocessors>,
    contexts: Vec<Option<Green>>,
    /// Destroyed by the program, and streams are left.
    condemned: Vec<Green>,
}

impl Greens {
    fn part(&self, number: u32) -> Result<Multiprocessors, CuResult> {
        let index = (number as usize).checked_sub(1);
        let found = index.and_then(|index| self.parts.get(index)).copied();
        found.ok_or_else(|| to_result(CuError::INVALID_RESOURCE_CONFIGURATION))
    }

    fn context(&self, number: u32) -> Result<RawGreen, CuResult> {
        let index = (number as usize).checked_sub(1);
        let found = index.and_then(|index| self.contexts.get(index)?.as_ref());
        found
            .map(|green| green.raw)
            .ok_or(CuResult::INVALID_CONTEXT)
    }

    /// Keeps what the device has described.
    fn enter(&mut self, part: &Multiprocessors) -> Result<GreenPart, CuResult> {
        if self.parts.len() >= OBJECTS as usize {
            return Err(CuResult::OUT_OF_MEMORY);
        }
        self.parts.push(*part);
        Ok(GreenPart {
            number: u32::try_from(self.parts.len()).map_err(|_| CuResult::OUT_OF_MEMORY)?,
            count: part.count,
            least: part.least,
            alignment: part.alignment,
        })
    }
}

impl Session {
    pub(super) fn describe_green(
        &mut self,
        call: &Call,
        green: u32,
    ) -> Outcome<GreenDescribeReply> {
        let green = match green {
            0 => None,
            green => match self.greens.context(green) {
                Ok(green) => Some(green),
                Err(error) => return Outcome::Failed(error),
            },
        };
        self.ask(
            call,
            move |device| device.multiprocessors(green),
            |session, found| match session.greens.enter(&found) {
                Ok(part) => Answer::reply(&GreenDescribeReply {
                    number: part.number,
                    count: part.count,
                    least: part.least,
                    alignment: part.alignment,
                }),
                Err(error) => Answer::failed(error),
            },
        )
    }

    pub(super) fn split_green<'s>(
        &mut self,
        call: &Call,
        message: &GreenSplit,
    ) -> Outcome<GreenSplitReply<'s>> {
        let part = match self.greens.part(message.part) {
            Ok(part) => part,
            Err(error) => return Outcome::Failed(error),
        };
        let (flags, least, groups) = (message.flags, message.least, message.groups.min(256));
        self.ask(
            call,
            move |device| device.split(&part, flags, least, groups),
            |session, split| {
                let parts = split.groups.iter().chain(split.rest.as_ref());
                let entered: Result<Vec<_>, _> =
                    parts.map(|part| session.greens.enter(part)).collect();
                match entered {
                    Ok(parts) => Answer::reply(&GreenSplitReply {
                        possible: split.possible,
                        rest: split.rest.is_some().into(),
                        parts: Items::new(&parts),
                    }),
                    Err(error) => Answer::failed(error),
                }
            },
        )
    }

    pub(super) fn create_green(
        &mut self,
        call: &Call,
        message: &GreenCreate<'_>,
    ) -> Outcome<GreenCreateReply> {
        let numbers = message.parts.iter();
        let parts: Result<Vec<_>, _> = numbers.map(|part| self.greens.part(part.number)).collect();
        let parts = match parts {
            Ok(parts) if self.greens.contexts.len() < OBJECTS as usize => parts,
            Ok(_) => return Outcome::Failed(CuResult::OUT_OF_MEMORY),
            Err(error) => return Outcome::Failed(error),
        };
        self.ask(
            call,
            move |device| device.create_green(&parts),
            |session, green| {
                let streams = Vec::new();
                let raw = green;
                session.greens.contexts.push(Some(Green { raw, streams }));
                match u32::try_from(session.greens.contexts.len()) {
                    Ok(green) => Answer::reply(&GreenCreateReply { green }),
                    Err(_) => Answer::failed(CuResult::OUT_OF_MEMORY),
                }
            },
        )
    }

    pub(super) fn destroy_green(&mut self, call: &Call, number: u32) -> Outcome<()> {
        let index = (number as usize).wrapping_sub(1);
        let Some(green) = self.greens.contexts.get_mut(index).and_then(Option::take) else {
            return Outcome::Failed(CuResult::INVALID_CONTEXT);
        };
        let mut all = std::mem::take(&mut self.greens.condemned);
        all.push(green);
        let (kept, ended): (Vec<_>, Vec<_>) = all.into_iter().partition(Green::has_streams);
        self.greens.condemned = kept;
        self.ask(
            call,
            move |device| {
                let mut ended = ended.iter();
                ended.try_for_each(|green| device.destroy_green(green.raw))
            },
            |_, ()| Answer::done(),
        )
    }

    pub(super) fn create_green_stream(
        &mut self,
        call: &Call,
        message: &GreenStream,
    ) -> Outcome<()> {
        let green = match self.greens.context(message.green) {
            Ok(green) => green,
            Err(error) => return Outcome::Failed(error),
        };
        let (new, flags, priority) = (message.new, message.flags, message.priority);
        let index = (message.green as usize).wrapping_sub(1);
        self.ask(
            call,
            move |device| device.green_stream(green, flags, priority),
            move |session, raw| {
                let stream = Arc::new(StreamObject::new(raw));
                // Destroyed meanwhile by another thread of the program, which is no program that is right.
                let Some(Some(green)) = session.greens.contexts.get_mut(index) else {
                    let _ = session.device.destroy_stream(raw);
                    return Answer::failed(CuResult::INVALID_CONTEXT);
                };
                green.streams.retain(|stream| stream.strong_count() != 0);
                green.streams.push(Arc::downgrade(&stream));
                match session.streams.insert(new, Arc::clone(&stream)) {
                    Ok(()) => {
                        session.watcher.watch(&stream);
                        Answer::done()
                    }
                    Err(error) => {
                        session.counters.add(Counter::InvalidHandles, 1);
                        let _ = session.device.destroy_stream(raw);
                        Answer::failed(error.into())
                    }
                }
            },
        )
    }
}
