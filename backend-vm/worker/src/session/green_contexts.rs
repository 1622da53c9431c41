//! Green contexts and parts of devices. Both are numbered from 1.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use wormhole_api::{
    CuResult, GreenCreate, GreenCreateReply, GreenDescribe, GreenDescribeReply, GreenDestroy,
    GreenPart, GreenSplit, GreenSplitReply, GreenStream, Items, Outcome, Serve,
};
use wormhole_device::{Multiprocessors, Split};

use super::closed;
use super::{Answer, Call, OBJECTS, Session};
use crate::objects::{GreenContextObject, StreamObject};

/// Largest number of groups of one split: with the remainder, as many parts as an answer holds.
const MOST_GROUPS: u32 = 254;
/// Largest number of splits that are cached.
const SPLITS: usize = 1 << 10;
/// Largest number of green contexts of a session. The driver takes channels for each, and all tenants' channels come out of one
/// supply of the device.
const MOST: usize = 128;

/// A part of a device.
#[derive(Debug)]
struct Part {
    /// Number of the device.
    device: usize,
    described: Multiprocessors,
    owner: Owner,
}

/// Origin of a part: it was described by one of these, or split off from another part of it.
#[derive(Debug)]
enum Owner {
    Device,
    /// Green contexts that look the same. Once none is left, the part may not be named: the driver's description may refer to
    /// them.
    Green(Vec<Weak<GreenContextObject>>),
}

/// A part that a job uses, and its green context, which the job keeps.
type UsedPart = (Multiprocessors, Option<Arc<GreenContextObject>>);

/// Number of the part, flags, least count and most groups.
type SplitKey = (u32, u32, u32, u32);

/// Parts and green contexts of a session, with the device of each.
#[derive(Debug, Default)]
pub(super) struct GreenContexts {
    parts: Vec<Part>,
    /// Number of each part of a device, so that none is entered twice.
    numbers: HashMap<(usize, Multiprocessors), u32>,
    /// Results of splits. A device may describe equal parts differently each time, so each split is
    /// done once.
    splits: HashMap<SplitKey, Arc<Split>>,
    contexts: Vec<Option<(usize, Arc<GreenContextObject>)>>,
    /// Indices of the empty entries of `contexts`.
    free: Vec<usize>,
    /// Each green context that is being made, exists or is being destroyed holds a clone.
    room: Arc<()>,
}

/// Streams and green contexts to destroy before a reset.
#[derive(Debug)]
pub(super) struct Ending {
    streams: Vec<Arc<StreamObject>>,
    contexts: Vec<Arc<GreenContextObject>>,
}

impl Ending {
    /// Destroys them all, streams first. Nothing may use them afterwards.
    pub fn end(self) {
        let ended = |what, ended: wormhole_device::Result<()>| {
            if let Err(error) = ended {
                tracing::debug!("destroying {what} before a reset: {error}");
            }
        };
        for stream in &self.streams {
            ended("a stream", stream.device.destroy_stream(stream.raw));
        }
        let of_streams = self.streams.iter().flat_map(|stream| &stream.green);
        for green in of_streams.chain(&self.contexts) {
            ended("a green context", green.end());
        }
    }
}

impl GreenContexts {
    /// Returns a part of the device `on`.
    fn part(&self, number: u32, on: usize) -> Result<UsedPart, CuResult> {
        let index = (number as usize).checked_sub(1);
        let part = index.and_then(|index| self.parts.get(index));
        let part = part.ok_or(CuResult::INVALID_RESOURCE_CONFIGURATION)?;
        if part.device != on {
            return Err(CuResult::INVALID_DEVICE);
        }
        let Owner::Green(owners) = &part.owner else {
            return Ok((part.described, None));
        };
        match owners.iter().find_map(Weak::upgrade) {
            Some(green) => Ok((part.described, Some(green))),
            None => Err(CuResult::INVALID_RESOURCE_CONFIGURATION),
        }
    }

    /// Returns a green context of the device `on`.
    fn context(&self, number: u32, on: usize) -> Result<Arc<GreenContextObject>, CuResult> {
        let index = (number as usize).checked_sub(1);
        match index.and_then(|index| self.contexts.get(index)?.as_ref()) {
            Some((device, green)) if *device == on => Ok(Arc::clone(green)),
            Some(_) => Err(CuResult::INVALID_DEVICE),
            None => Err(CuResult::INVALID_CONTEXT),
        }
    }

    /// Enters a part that the device `on` has described, unless it is known, and returns its number
    /// and values. `of` is the green context that it belongs to.
    fn enter(
        &mut self,
        on: usize,
        part: &Multiprocessors,
        of: Option<&Arc<GreenContextObject>>,
    ) -> Result<GreenPart, CuResult> {
        let number = match self.numbers.get(&(on, *part)).copied() {
            Some(number) => {
                self.belongs_to(number, of);
                number
            }
            None if self.parts.len() >= OBJECTS as usize => return Err(CuResult::OUT_OF_MEMORY),
            None => {
                self.parts.push(Part {
                    device: on,
                    described: *part,
                    owner: match of {
                        Some(green) => Owner::Green(vec![Arc::downgrade(green)]),
                        None => Owner::Device,
                    },
                });
                let number = number_of(self.parts.len())?;
                self.numbers.insert((on, *part), number);
                number
            }
        };
        Ok(GreenPart {
            number,
            count: part.count,
            least: part.least,
            alignment: part.alignment,
        })
    }

    /// Notes that a known part was described by the device, or by a green context. If all its green contexts are gone, it is
    /// another part that looks the same, and splits of it are done anew.
    fn belongs_to(&mut self, number: u32, green: Option<&Arc<GreenContextObject>>) {
        let index = (number as usize).checked_sub(1);
        let Some(part) = index.and_then(|index| self.parts.get_mut(index)) else {
            return;
        };
        match (&mut part.owner, green) {
            (Owner::Device, _) => {}
            (owner, None) => *owner = Owner::Device,
            (Owner::Green(known), Some(green)) => {
                known.retain(|known| known.strong_count() != 0);
                if known.is_empty() {
                    self.splits.retain(|(split, ..), _| *split != number);
                }
                if !known
                    .iter()
                    .any(|known| known.as_ptr() == Arc::as_ptr(green))
                {
                    known.push(Arc::downgrade(green));
                }
            }
        }
    }

    /// Takes the room of one more green context. A green context without a handle keeps its room while it has streams.
    ///
    /// # Errors
    /// `CUDA_ERROR_OUT_OF_MEMORY`: the session has as many as it may.
    fn take_room(&self) -> Result<Arc<()>, CuResult> {
        match Arc::strong_count(&self.room) <= MOST {
            true => Ok(Arc::clone(&self.room)),
            false => Err(CuResult::OUT_OF_MEMORY),
        }
    }

    /// Enters a green context of the device `on` and returns its number.
    fn enter_context(&mut self, on: usize, green: GreenContextObject) -> Result<u32, CuResult> {
        let index = self.free.pop().unwrap_or_else(|| {
            self.contexts.push(None);
            self.contexts.len() - 1
        });
        self.contexts[index] = Some((on, Arc::new(green)));
        number_of(index + 1)
    }

    /// Removes a green context, so that it may not be named any more.
    fn remove_context(
        &mut self,
        number: u32,
        on: usize,
    ) -> Result<Arc<GreenContextObject>, CuResult> {
        let green = self.context(number, on)?;
        let index = number as usize - 1;
        self.contexts[index] = None;
        self.free.push(index);
        Ok(green)
    }

    fn answer(&mut self, on: usize, split: &Split, of: Option<&Arc<GreenContextObject>>) -> Answer {
        let parts = split.groups.iter().chain(split.rest.as_ref());
        let entered: Result<Vec<_>, _> = parts.map(|part| self.enter(on, part, of)).collect();
        match entered {
            Ok(parts) => Answer::reply(&GreenSplitReply {
                possible: split.possible,
                rest: split.rest.is_some().into(),
                parts: Items::new(&parts),
            }),
            Err(error) => Answer::failed(error),
        }
    }

    /// Forgets the green contexts, because their context is going to be reset, and returns them
    /// with those of `streams` that are in green contexts.
    pub fn clear(&mut self, mut streams: Vec<Arc<StreamObject>>) -> Ending {
        streams.retain(|stream| stream.green.is_some());
        self.free.clear();
        let contexts = self.contexts.drain(..).flatten();
        Ending {
            streams,
            contexts: contexts.map(|(_, green)| green).collect(),
        }
    }
}

/// Returns the number of the last of `count` entries, which are numbered from 1.
fn number_of(count: usize) -> Result<u32, CuResult> {
    u32::try_from(count).map_err(|_| CuResult::OUT_OF_MEMORY)
}

impl Serve<GreenDescribe> for Session {
    fn serve(&mut self, call: &Call, message: &GreenDescribe) -> Outcome<GreenDescribeReply> {
        let on = call.device;
        let green = match message.green {
            0 => None,
            green => Some(self.objects.green_contexts.context(green, on)?),
        };
        self.ask(
            call,
            self.here(call),
            move |device| {
                let found = device.multiprocessors(green.as_ref().map(|green| green.raw))?;
                Ok((found, green))
            },
            move |session, (found, green)| {
                let green_contexts = &mut session.objects.green_contexts;
                match green_contexts.enter(on, &found, green.as_ref()) {
                    Ok(part) => Answer::reply(&GreenDescribeReply {
                        number: part.number,
                        count: part.count,
                        least: part.least,
                        alignment: part.alignment,
                    }),
                    Err(error) => Answer::failed(error),
                }
            },
        )
    }
}

impl Serve<GreenSplit> for Session {
    fn serve<'s>(&'s mut self, call: &Call, message: &GreenSplit) -> Outcome<GreenSplitReply<'s>> {
        let on = call.device;
        closed::GREEN_SPLIT.check(message.flags)?;
        let (part, green) = self.objects.green_contexts.part(message.part, on)?;
        let groups = message.groups.min(MOST_GROUPS);
        let (flags, least) = (message.flags, message.least);
        let key = (message.part, flags, least, groups);
        let known = self.objects.green_contexts.splits.get(&key).cloned();
        self.ask(
            call,
            self.here(call),
            move |device| match known {
                Some(split) => Ok(split),
                None => device.split(&part, flags, least, groups).map(Arc::new),
            },
            move |session, split| {
                let green_contexts = &mut session.objects.green_contexts;
                let answer = green_contexts.answer(on, &split, green.as_ref());
                if green_contexts.splits.len() < SPLITS {
                    green_contexts.splits.insert(key, split);
                }
                answer
            },
        )
    }
}

impl Serve<GreenCreate<'_>> for Session {
    fn serve(&mut self, call: &Call, message: &GreenCreate<'_>) -> Outcome<GreenCreateReply> {
        let on = call.device;
        let numbers = message.parts.iter();
        let parts = numbers
            .map(|part| self.objects.green_contexts.part(part.number, on))
            .collect::<Result<Vec<_>, _>>()?;
        let room = self.objects.green_contexts.take_room()?;
        let device = self.here(call);
        self.ask(
            call,
            device.clone(),
            move |device| {
                let described: Vec<_> = parts.iter().map(|(part, _)| *part).collect();
                device.create_green(&described)
            },
            move |session, raw| {
                let green = GreenContextObject::new(device, raw, session.registrar.clone(), room);
                match session.objects.green_contexts.enter_context(on, green) {
                    Ok(green) => Answer::reply(&GreenCreateReply { green }),
                    Err(error) => Answer::failed(error),
                }
            },
        )
    }
}

/// Removes the green context. It is destroyed when none of its streams and no job that uses it is
/// left.
impl Serve<GreenDestroy> for Session {
    fn serve(&mut self, call: &Call, message: &GreenDestroy) -> Outcome<()> {
        let number = message.green;
        let green = self
            .objects
            .green_contexts
            .remove_context(number, call.device)?;
        self.order(call, self.here(call), move |_| {
            Arc::into_inner(green).map_or(Ok(()), |green| green.end())
        })
    }
}

impl Serve<GreenStream> for Session {
    fn serve(&mut self, call: &Call, message: &GreenStream) -> Outcome<()> {
        closed::GREEN_STREAM.check(message.flags)?;
        let green = self
            .objects
            .green_contexts
            .context(message.green, call.device)?;
        let (new, flags, priority) = (message.new, message.flags, message.priority);
        let its = Arc::clone(&green);
        self.ask(
            call,
            self.here(call),
            move |device| device.green_stream(green.raw, flags, priority),
            move |session, raw| Answer::of(session.enter_stream(new, StreamObject::of(its, raw))),
        )
    }
}
