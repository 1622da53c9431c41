//! Loads, stores and reductions of surfaces of every geometry.

use wormhole_device::Format;
use wormhole_device::array::{LAYERED, SURFACE_LDST};

use crate::form::Form;
use crate::object::{Object, Picture};
use crate::operands::Class::{self, Index, Int};

/// Number of rows of a form, and of texels of an image in which each row writes one.
const ROWS: usize = 64;
const BOUNDARIES: [&str; 3] = ["trap", "clamp", "zero"];

/// Geometry: its name, its image's extent (64 texels in all), and the order of the instruction's coordinates.
/// The coordinate of dimension 0 counts bytes.
struct Geometry {
    name: &'static str,
    extent: [u64; 3],
    flags: u32,
    /// Dimension of the extent for each coordinate. Dimension 0 is in bytes.
    order: &'static [usize],
}

const GEOMETRIES: [Geometry; 5] = [
    Geometry {
        name: "1d",
        extent: [64, 0, 0],
        flags: SURFACE_LDST,
        order: &[0],
    },
    Geometry {
        name: "2d",
        extent: [8, 8, 0],
        flags: SURFACE_LDST,
        order: &[0, 1],
    },
    Geometry {
        name: "3d",
        extent: [4, 8, 2],
        flags: SURFACE_LDST,
        order: &[0, 1, 2],
    },
    Geometry {
        name: "a1d",
        extent: [16, 0, 4],
        flags: SURFACE_LDST | LAYERED,
        order: &[2, 0],
    },
    Geometry {
        name: "a2d",
        extent: [8, 4, 2],
        flags: SURFACE_LDST | LAYERED,
        order: &[2, 0, 1],
    },
];

impl Geometry {
    /// Returns the classes of coordinates inside the image, or a little outside as well.
    fn places(&self, step: u8, outside: bool) -> Vec<Class> {
        let class = |dimension: usize| {
            let extent = u8::try_from(self.extent[dimension]).unwrap_or(u8::MAX);
            // Layers stay inside the image: results would not show whether they are clamped.
            let is_layer = self.flags & LAYERED != 0 && dimension == 2;
            let (first, count) = if outside && !is_layer {
                (-3, extent + 6)
            } else {
                (0, extent)
            };
            Index {
                first,
                count,
                step: if dimension == 0 { step } else { 1 },
            }
        };
        self.order
            .iter()
            .map(|&dimension| class(dimension))
            .collect()
    }

    /// Joins registers to a vector, padded to a length that vectors have.
    fn vector(names: &[String]) -> String {
        let mut names = names.to_vec();
        if names.len() == 3 {
            names.push(names[2].clone());
        }
        format!("{{{}}}", names.join(", "))
    }

    fn place(&self) -> String {
        let names: Vec<_> = (0..self.order.len()).map(|i| format!("%i{i}")).collect();
        Self::vector(&names)
    }

    /// Returns the instructions that compute the position of row `%t`, and the position.
    fn own(&self, texel: u64) -> (String, String) {
        let [width, height, _] = self.extent.map(|extent| extent.max(1));
        let code = format!(
            ".reg .b32 %at<3>; rem.u32 %at0, %t, {width}; mul.lo.u32 %at0, %at0, {texel};
div.u32 %at1, %t, {width}; rem.u32 %at1, %at1, {height}; div.u32 %at2, %t, {};",
            width * height
        );
        let names: Vec<_> = self.order.iter().map(|i| format!("%at{i}")).collect();
        (code, Self::vector(&names))
    }
}

/// Width and count of an element's components, and the texel format that they match.
const ELEMENTS: [(u32, usize, Format, u32); 11] = [
    (8, 1, Format::Unsigned8, 1),
    (8, 2, Format::Unsigned8, 2),
    (8, 4, Format::Unsigned8, 4),
    (16, 1, Format::Unsigned16, 1),
    (16, 2, Format::Unsigned16, 2),
    (16, 4, Format::Unsigned16, 4),
    (32, 1, Format::Unsigned32, 1),
    (32, 2, Format::Unsigned32, 2),
    (32, 4, Format::Unsigned32, 4),
    (64, 1, Format::Unsigned32, 2),
    (64, 2, Format::Unsigned32, 4),
];

/// Returns the register width of an element.
fn register(bits: u32) -> u32 {
    bits.max(16)
}

fn list(letter: char, from: usize, count: usize) -> String {
    let names: Vec<_> = (from..from + count)
        .map(|i| format!("%{letter}{i}"))
        .collect();
    format!("{{{}}}", names.join(", "))
}

fn suffix(bits: u32, count: usize) -> String {
    match count {
        1 => format!("b{bits}"),
        _ => format!("v{count}.b{bits}"),
    }
}

pub fn loads() -> Vec<Form> {
    let mut forms = Vec::new();
    for geometry in &GEOMETRIES {
        for (bits, count, format, channels) in ELEMENTS {
            for boundary in BOUNDARIES {
                let picture = Picture::new(geometry.extent, format, channels, geometry.flags);
                let step = u8::try_from(picture.texel_bytes()).unwrap_or(0);
                let inputs = geometry.places(step, boundary != "trap");
                let op = format!(
                    "suld.b.{}.{}.{boundary}",
                    geometry.name,
                    suffix(bits, count)
                );
                let body = format!("{op} {}, [%h, {}];", list('o', 0, count), geometry.place());
                let outputs = vec![register(bits); count];
                let form = Form::new(&op, &inputs, &outputs, body).rows(ROWS);
                forms.push(form.with(Object::Surface(picture)));
            }
        }
    }
    // Accesses to parts of texels.
    for (bits, boundary) in [(8, "clamp"), (8, "zero"), (16, "clamp"), (16, "zero")] {
        let geometry = &GEOMETRIES[1];
        let picture = Picture::new(geometry.extent, Format::Unsigned8, 4, geometry.flags);
        let index = |first, count, step| Index { first, count, step };
        let inputs = [
            index(-4, 40, u8::try_from(bits / 8).unwrap_or(1)),
            index(-2, 12, 1),
        ];
        let op = format!("suld.b.2d.b{bits}.{boundary}");
        let body = format!("{op} {{%o0}}, [%h, {}];", geometry.place());
        let form = Form::new(&format!("{op} of u8x4"), &inputs, &[register(bits)], body);
        forms.push(form.rows(ROWS).with(Object::Surface(picture)));
    }
    let geometry = &GEOMETRIES[1];
    let picture = Picture::new(geometry.extent, Format::Unsigned32, 1, geometry.flags);
    let op = "suld.b.2d.b32.trap";
    let body = format!("{op} {{%o0}}, [%h, {{%i0, %i1}}];");
    let beyond = Index {
        first: 8,
        count: 1,
        step: 4,
    };
    let form = Form::new(&format!("{op} outside"), &[beyond; 2], &[32], body).rows(1);
    forms.push(form.with(Object::Surface(picture)));
    forms
}

/// Returns the widths of the results that an image's 64 texels form.
fn contents(texel: u64) -> Vec<u32> {
    match texel {
        16 => vec![64, 64],
        bytes => vec![u32::try_from(8 * bytes).unwrap_or(0)],
    }
}

pub fn stores() -> Vec<Form> {
    let mut forms = Vec::new();
    for geometry in &GEOMETRIES {
        for (bits, count, format, channels) in ELEMENTS {
            for boundary in BOUNDARIES {
                let picture = Picture::new(geometry.extent, format, channels, geometry.flags);
                let texel = picture.texel_bytes();
                let outputs = contents(texel);
                let op = format!(
                    "sust.b.{}.{}.{boundary}",
                    geometry.name,
                    suffix(bits, count)
                );
                // Each row stores to its own texel.
                let (code, place) = geometry.own(texel);
                let inputs = vec![Int(register(bits)); count];
                let body = format!("{code} {op} [%h, {place}], {};", list('i', 0, count));
                let form = Form::new(&op, &inputs, &outputs, body).rows(ROWS);
                forms.push(form.with(Object::Written(picture)));
                if boundary == "trap" {
                    continue;
                }
                // A few rows store one value inside and outside the image: the answer records which texels
                // hold it.
                let step = u8::try_from(texel).unwrap_or(0);
                let inputs = geometry.places(step, true);
                let wide = register(bits);
                let marks = vec!["%mark".to_owned(); count].join(", ");
                let body = format!(
                    ".reg .b{wide} %mark; .reg .pred %few; setp.lt.u32 %few, %t, 12;
mov.b{wide} %mark, 0x5a; @%few {op} [%h, {}], {{{marks}}};",
                    geometry.place()
                );
                let form = Form::new(&format!("{op} outside"), &inputs, &outputs, body);
                forms.push(form.rows(ROWS).with(Object::Written(picture)));
            }
        }
    }
    let geometry = &GEOMETRIES[1];
    let picture = Picture::new(geometry.extent, Format::Unsigned32, 1, geometry.flags);
    let op = "sust.b.2d.b32.trap";
    let body = format!("{op} [%h, {{%i0, %i1}}], {{%i0}};");
    let beyond = Index {
        first: 8,
        count: 1,
        step: 4,
    };
    let form = Form::new(&format!("{op} far outside"), &[beyond; 2], &[32], body).rows(ROWS);
    forms.push(form.with(Object::Written(picture)));
    forms
}

pub fn reductions() -> Vec<Form> {
    let mut forms = Vec::new();
    for geometry in GEOMETRIES
        .iter()
        .filter(|geometry| geometry.flags & LAYERED == 0)
    {
        for (op, types) in [
            ("add", &["u32", "s32", "u64"][..]),
            ("min", &["u32", "s32", "u64", "s64"]),
            ("max", &["u32", "s32", "u64", "s64"]),
            ("and", &["b32"]),
            ("or", &["b32"]),
        ] {
            for ty in types {
                for boundary in BOUNDARIES {
                    let wide = super::bits(ty);
                    let picture = Picture::new(
                        geometry.extent,
                        Format::Unsigned32,
                        wide / 32,
                        geometry.flags,
                    );
                    let texel = picture.texel_bytes();
                    let step = u8::try_from(texel).unwrap_or(0);
                    let mut inputs = geometry.places(step, boundary != "trap");
                    inputs.push(Int(wide));
                    let value = inputs.len() - 1;
                    let op = format!("sured.b.{op}.{}.{ty}.{boundary}", geometry.name);
                    let body = format!("{op} [%h, {}], %i{value};", geometry.place());
                    let form = Form::new(&op, &inputs, &contents(texel), body).rows(ROWS);
                    forms.push(form.with(Object::Written(picture)));
                }
            }
        }
    }
    forms
}
