//! Frames of functions and the local memory of a warp.

use crate::alu::{LANES, Row};
use crate::decode::insn::FunctionCode;
use crate::error::FaultKind;
use crate::limits::{MAX_BLOCK_ROW_BYTES, MAX_CALL_DEPTH, MAX_LOCAL_BYTES};

/// Index of a frame in its warp.
pub(super) type FrameId = u32;

/// Parent of the kernel's own frame.
pub(super) const NO_FRAME: FrameId = u32::MAX;

/// Activation of a function, shared by the lanes that called it together.
#[derive(Debug)]
pub(super) struct Frame {
    pub function: u32,
    pub rows: Vec<Row>,
    pub preds: Vec<u32>,
    /// Carry flag of each lane.
    pub carry: u32,
    /// Start of the frame's part of local memory.
    pub local_base: u32,
    /// Bytes that `alloca` allocated, beyond the function's own.
    pub allocated: u32,
    pub parent: FrameId,
    /// Program counter of the call in the parent.
    pub call_pc: u32,
    /// Lanes that have not returned.
    pub lanes: u32,
    pub depth: u32,
}

impl Frame {
    /// Allocates `bytes` of local memory beyond the `own` bytes of the function. Returns the start
    /// and the end.
    pub(super) fn allocate(
        &mut self,
        own: u32,
        bytes: u64,
        align: u32,
    ) -> Result<(u32, u32), FaultKind> {
        let limit = u64::from(MAX_LOCAL_BYTES);
        let base = u64::from(self.local_base + own);
        let start = (base + u64::from(self.allocated)).next_multiple_of(u64::from(align));
        let end = start
            .checked_add(bytes)
            .and_then(|end| end.checked_next_multiple_of(16));
        let Some(end) = end.filter(|&end| end <= limit) else {
            return Err(FaultKind::StackOverflow);
        };
        let narrow = |value: u64| u32::try_from(value).map_err(|_| FaultKind::StackOverflow);
        self.allocated = narrow(end - base)?;
        Ok((narrow(start)?, narrow(end)?))
    }
}

/// Frames of a warp. Frames that their lanes have left are reused.
#[derive(Debug, Default)]
pub(super) struct Frames {
    list: Vec<Frame>,
    idle: Vec<FrameId>,
    /// Bytes of all rows.
    row_bytes: usize,
}

/// Maximum bytes of rows of one warp.
const MAX_WARP_ROW_BYTES: usize = MAX_BLOCK_ROW_BYTES / 32;

impl Frames {
    pub(super) fn get(&self, id: FrameId) -> &Frame {
        &self.list[id as usize]
    }

    pub(super) fn get_mut(&mut self, id: FrameId) -> &mut Frame {
        &mut self.list[id as usize]
    }

    /// Returns both frames of a call.
    pub(super) fn pair(&mut self, a: FrameId, b: FrameId) -> (&mut Frame, &mut Frame) {
        let (a, b) = (a as usize, b as usize);
        if a < b {
            let (low, high) = self.list.split_at_mut(b);
            (&mut low[a], &mut high[0])
        } else {
            let (low, high) = self.list.split_at_mut(a);
            (&mut high[0], &mut low[b])
        }
    }

    /// Adds a frame for `lanes`. The function is its index, its code and the offset of dynamic
    /// shared memory.
    pub(super) fn push(
        &mut self,
        (function, code, dynamic_shared): (u32, &FunctionCode, u32),
        parent: FrameId,
        call_pc: u32,
        lanes: u32,
    ) -> Result<FrameId, FaultKind> {
        let (depth, local_base) = if parent == NO_FRAME {
            (0, 0)
        } else {
            let parent = self.get(parent);
            (parent.depth + 1, parent.local_base)
        };
        if depth > MAX_CALL_DEPTH {
            return Err(FaultKind::StackOverflow);
        }
        // A frame that ran the same function still has the constants in its rows.
        if let Some(at) = self
            .idle
            .iter()
            .rposition(|&id| self.list[id as usize].function == function)
        {
            let id = self.idle.swap_remove(at);
            let frame = self.get_mut(id);
            (frame.parent, frame.call_pc, frame.lanes) = (parent, call_pc, lanes);
            (frame.depth, frame.local_base, frame.allocated) = (depth, local_base, 0);
            return Ok(id);
        }
        let idle = self.idle.pop();
        let freed = idle.map_or(0, |id| self.list[id as usize].rows.len());
        let row_bytes =
            self.row_bytes + code.rows as usize * size_of::<Row>() - freed * size_of::<Row>();
        if row_bytes > MAX_WARP_ROW_BYTES {
            return Err(FaultKind::StackOverflow);
        }
        self.row_bytes = row_bytes;
        let mut rows = vec![[0; LANES]; code.rows as usize];
        for &(reg, value) in &code.constants {
            rows[reg as usize] = [value; LANES];
        }
        for &(reg, offset) in &code.dynamic {
            rows[reg as usize] = [offset.wrapping_add(u64::from(dynamic_shared)); LANES];
        }
        let mut preds = vec![0; code.preds.max(1) as usize];
        preds[0] = u32::MAX;
        let frame = Frame {
            function,
            rows,
            preds,
            carry: 0,
            local_base,
            allocated: 0,
            parent,
            call_pc,
            lanes,
            depth,
        };
        if let Some(id) = idle {
            *self.get_mut(id) = frame;
            return Ok(id);
        }
        let id = u32::try_from(self.list.len()).map_err(|_| FaultKind::StackOverflow)?;
        self.list.push(frame);
        Ok(id)
    }

    /// Marks lanes of a frame as returned or ended.
    pub(super) fn leave(&mut self, id: FrameId, lanes: u32) {
        let frame = self.get_mut(id);
        frame.lanes &= !lanes;
        if frame.lanes == 0 {
            self.idle.push(id);
        }
    }
}

/// Local memory of the lanes of a warp, one range for each.
#[derive(Debug, Default)]
pub(super) struct Local {
    bytes: Vec<u8>,
    stride: u32,
}

impl Local {
    /// Grows the memory of every lane to at least `wanted` bytes.
    pub(super) fn reserve(&mut self, wanted: u32) -> Result<(), FaultKind> {
        if wanted <= self.stride {
            return Ok(());
        }
        if wanted > MAX_LOCAL_BYTES {
            return Err(FaultKind::StackOverflow);
        }
        let stride = wanted.next_power_of_two().clamp(64, MAX_LOCAL_BYTES);
        let mut bytes = vec![0; stride as usize * LANES];
        for (lane, old) in self
            .bytes
            .chunks_exact(self.stride.max(1) as usize)
            .enumerate()
        {
            let start = lane * stride as usize;
            bytes[start..start + old.len()].copy_from_slice(old);
        }
        self.bytes = bytes;
        self.stride = stride;
        Ok(())
    }

    /// Returns `bytes` bytes of one lane, starting at `address`.
    #[inline]
    pub(super) fn slice(&self, lane: usize, address: u64, bytes: u32) -> Option<&[u8]> {
        let start = self.start(lane, address, bytes)?;
        self.bytes.get(start..start + bytes as usize)
    }

    /// Returns `bytes` bytes of one lane for writing, starting at `address`.
    #[inline]
    pub(super) fn slice_mut(&mut self, lane: usize, address: u64, bytes: u32) -> Option<&mut [u8]> {
        let start = self.start(lane, address, bytes)?;
        self.bytes.get_mut(start..start + bytes as usize)
    }

    /// Copies within one lane's memory. Does nothing if a range is out of bounds.
    pub(super) fn copy(&mut self, lane: usize, from: u64, to: u64, bytes: u32) {
        if let (Some(from), Some(to)) = (self.start(lane, from, bytes), self.start(lane, to, bytes))
        {
            self.bytes.copy_within(from..from + bytes as usize, to);
        }
    }

    #[inline]
    fn start(&self, lane: usize, address: u64, bytes: u32) -> Option<usize> {
        let end = address.checked_add(u64::from(bytes))?;
        if end > u64::from(self.stride) {
            return None;
        }
        usize::try_from(address)
            .ok()
            .map(|address| lane * self.stride as usize + address)
    }
}
