//! Texels: storage formats, and conversion to the values that fetches return.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "channels of at most 16 bits become floats, and a border's colour such channels"
)]

use super::{ChannelType, Image, Level, Texture};
use crate::alu::half::{F16, Short};
use crate::error::FaultKind;
use crate::exec::global::{Global, Word};

/// Channels of a texel, extended to words: integers, or bits of singles.
pub(super) type Texel = [u32; 4];

/// Reads a texel that lies inside its level.
pub(super) fn read(
    global: &mut Global<'_>,
    image: &Image,
    level: &Level,
    [x, y, z]: [u32; 3],
) -> Result<Texel, FaultKind> {
    let bytes = image.texel_bytes();
    let address = level
        .address
        .wrapping_add(u64::from(x) * u64::from(bytes))
        .wrapping_add(u64::from(y).wrapping_mul(level.row_pitch))
        .wrapping_add(u64::from(z).wrapping_mul(level.slice_pitch));
    let at = global.translate(address, bytes, false)?;
    let mut texel = [0; 4];
    for (index, value) in texel.iter_mut().take(image.channels as usize).enumerate() {
        let at = at.wrapping_add(index * image.channel.bytes() as usize);
        // SAFETY: `translate` found the aligned bytes of the texel inside a region that stays valid.
        *value = unsafe {
            match image.channel {
                ChannelType::Unsigned8 => u32::from(u8::read(at)),
                ChannelType::Signed8 => i32::from(i8::read(at)).cast_unsigned(),
                ChannelType::Unsigned16 => u32::from(u16::read(at)),
                ChannelType::Signed16 => i32::from(i16::read(at)).cast_unsigned(),
                ChannelType::Half => F16::of(u16::read(at)).wide().to_bits(),
                ChannelType::Unsigned32 | ChannelType::Signed32 | ChannelType::Single => {
                    u32::read(at)
                }
            }
        };
    }
    Ok(texel)
}

/// Inverts the sRGB curve to eight significant bits, as an H200 does.
pub(super) fn linear_colour(x: f32) -> f32 {
    let exact = if x <= 0.040_45 {
        x / 12.92
    } else {
        ((x + 0.055) / 1.055).powf(2.4)
    };
    f32::from_bits((exact.to_bits() + 0x8000) & 0xffff_0000)
}

impl Texture {
    /// Returns whether fetches return floats.
    pub(super) fn gives_floats(&self) -> bool {
        match self.image.channel {
            ChannelType::Single | ChannelType::Half => true,
            ChannelType::Unsigned32 | ChannelType::Signed32 => false,
            _ => self.as_floats,
        }
    }

    /// Returns the divisor of integers that are read as floats.
    pub(super) fn unit(&self) -> Option<f32> {
        self.gives_floats().then_some(match self.image.channel {
            ChannelType::Unsigned8 => 255.0,
            ChannelType::Signed8 => 127.0,
            ChannelType::Unsigned16 => 65_535.0,
            ChannelType::Signed16 => 32_767.0,
            _ => return None,
        })
    }

    /// Returns the border's colour in the form in which texels of this type would hold it.
    pub(super) fn edge(&self) -> Texel {
        let mut texel = [0; 4];
        let channels = self.image.channels as usize;
        for (value, bits) in texel.iter_mut().zip(self.border).take(channels) {
            *value = match (self.unit(), self.image.channel) {
                (Some(scale), channel) => {
                    let least = match channel {
                        ChannelType::Signed8 | ChannelType::Signed16 => -1.0,
                        _ => 0.0,
                    };
                    let colour = f32::from_bits(bits).max(least).min(1.0);
                    ((colour * scale) as i32).cast_unsigned()
                }
                (None, ChannelType::Unsigned8) => u32::from(bits as u8),
                (None, ChannelType::Signed8) => i32::from(bits as i8).cast_unsigned(),
                (None, ChannelType::Unsigned16) => u32::from(bits as u16),
                (None, ChannelType::Signed16) => i32::from(bits as i16).cast_unsigned(),
                (None, _) => bits,
            };
        }
        texel
    }

    /// Returns whether a channel holds a colour with the sRGB curve. The last of several channels is the
    /// opacity.
    pub(super) fn is_curved(&self, channel: usize) -> bool {
        let channels = self.image.channels as usize;
        let opacity = channels > 1 && channel == channels - 1;
        self.srgb && !opacity && self.unit() == Some(255.0)
    }

    /// Converts a texel to the value that a fetch returns: integers unchanged, or floats.
    pub(super) fn finish(&self, mut texel: Texel) -> Texel {
        if let Some(scale) = self.unit() {
            for (channel, value) in texel.iter_mut().enumerate() {
                let unit = (value.cast_signed() as f32 / scale).max(-1.0);
                let colour = self.is_curved(channel);
                *value = if colour { linear_colour(unit) } else { unit }.to_bits();
            }
        }
        texel
    }
}
