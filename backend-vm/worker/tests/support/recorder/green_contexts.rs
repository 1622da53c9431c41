//! Green contexts of the recorder, which has 16 multiprocessors.

use wormhole_device::{
    DriverCalls, GreenContexts, Multiprocessors, RawGreenContext, RawStream, Result, Split,
};

use super::Recorder;

const ALL: Multiprocessors = Multiprocessors {
    count: 16,
    least: 8,
    alignment: 8,
    described: [0; 18],
};

/// Describes the multiprocessors of a green context, which the description names.
fn part_of(green: RawGreenContext) -> Multiprocessors {
    let mut part = ALL;
    part.described[0] = green.0;
    part
}

impl GreenContexts for Recorder {
    fn multiprocessors(&self, green: Option<RawGreenContext>) -> Result<Multiprocessors> {
        self.arrive("multiprocessors");
        match green {
            Some(green) => self.check(green.0).map(|()| part_of(green)),
            None => Ok(ALL),
        }
    }
    fn split(&self, from: &Multiprocessors, _: u32, _: u32, groups: u32) -> Result<Split> {
        self.arrive("split");
        Ok(Split {
            possible: 2,
            groups: vec![*from; groups.min(2) as usize],
            rest: None,
        })
    }
    fn create_green(&self, _: &[Multiprocessors]) -> Result<RawGreenContext> {
        self.arrive("create_green");
        Ok(RawGreenContext(self.make()))
    }
    fn destroy_green(&self, green: RawGreenContext) -> Result<()> {
        self.arrive("destroy_green");
        self.end(green.0)
    }
    fn green_stream(&self, green: RawGreenContext, flags: u32, priority: i32) -> Result<RawStream> {
        self.arrive("green_stream");
        self.check(green.0)?;
        self.stream_create(flags, priority)
    }
}
