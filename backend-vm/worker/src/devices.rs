//! The session's devices.

use std::ops::{Deref, Index};
use std::sync::Arc;

use wormhole_api::CuResult;
use wormhole_device::{AfterFence, CuError, Device, DeviceOutput, Result};
use wormhole_link::device::MOST;
use wormhole_ring::waits::Waits;

/// One of the session's devices, and the number by which messages name it. Objects of the device
/// hold it.
#[derive(Clone, Debug)]
pub struct SessionDevice {
    number: usize,
    device: Arc<dyn Device>,
}

impl Deref for SessionDevice {
    type Target = dyn Device;

    fn deref(&self) -> &Self::Target {
        self.device.as_ref()
    }
}

impl PartialEq for SessionDevice {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl SessionDevice {
    pub fn number(&self) -> usize {
        self.number
    }

    /// Returns a handle of `owner` if `owner` is this device.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_HANDLE`: `owner` is another device.
    #[inline]
    pub fn own<T>(&self, owner: &Self, raw: T) -> Result<T> {
        if self == owner {
            Ok(raw)
        } else {
            Err(CuError::INVALID_HANDLE)
        }
    }
}

/// All devices of the session, indexed by number.
#[derive(Clone, Debug)]
pub struct Devices(Arc<[SessionDevice]>);

impl Devices {
    /// Numbers the devices, which are all of one kind, in order.
    ///
    /// # Panics
    /// `devices` is empty or longer than [`MOST`].
    #[must_use]
    pub fn new(devices: Vec<Arc<dyn Device>>) -> Self {
        assert!((1..=MOST).contains(&devices.len()));
        let numbered = devices.into_iter().enumerate();
        Self(
            numbered
                .map(|(number, device)| SessionDevice { number, device })
                .collect(),
        )
    }

    /// Finds a device by the number in a message.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_DEVICE`: the session has no device of this number.
    pub fn get(&self, number: u32) -> std::result::Result<&SessionDevice, CuResult> {
        let number = usize::try_from(number).map_err(|_| CuResult::INVALID_DEVICE)?;
        self.0.get(number).ok_or(CuResult::INVALID_DEVICE)
    }

    /// Has the devices wake the guest's threads that sleep for a fence, after each fence. Returns false
    /// if hardware writes the fences.
    pub fn call_after_fences(&self, waits: &Waits) -> bool {
        self.iter().all(|device| {
            let waits = waits.clone();
            device.call_after_fences(AfterFence::new(move || {
                waits.fence_before_look();
                waits.wake();
            }))
        })
    }

    pub fn iter(&self) -> std::slice::Iter<'_, SessionDevice> {
        self.0.iter()
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Returns the sticky error of the first device whose context is dead.
    pub fn fault(&self) -> Option<CuError> {
        self.iter().find_map(|device| device.health(&[]))
    }

    /// Takes the kernel output of all devices.
    pub fn take_output(&self) -> DeviceOutput {
        let mut all = DeviceOutput::default();
        for device in self.iter() {
            let text = device.take_output();
            all.stdout.extend(text.stdout);
            all.stderr.extend(text.stderr);
        }
        all
    }

    /// Describes the devices' queues, one line each.
    pub fn queues(&self) -> Vec<String> {
        let several = self.count() > 1;
        let lines = self.iter().flat_map(|device| {
            device.queues().into_iter().map(move |line| match several {
                true => format!("device {}: {line}", device.number),
                false => line,
            })
        });
        lines.collect()
    }
}

impl Index<usize> for Devices {
    type Output = SessionDevice;

    fn index(&self, number: usize) -> &SessionDevice {
        &self.0[number]
    }
}
