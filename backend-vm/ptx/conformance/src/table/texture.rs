//! Fetches from textures of every geometry, and queries of them.

use wormhole_device::array::{CUBEMAP, LAYERED, TEXTURE_GATHER};
use wormhole_device::constants::{address_mode, filter_mode, texture_flags};
use wormhole_device::{Format, Sampling};

use crate::form::Form;
use crate::object::{Object, Picture, Source};
use crate::operands::Class::{self, Coordinate, Detail, Direction, Index, SmallInt};

/// Number of rows of a form.
const ROWS: usize = 96;

/// Geometry of fetches: its name, the extent of its images, the number of coordinates, and the array flags.
struct Geometry {
    name: &'static str,
    extent: [u64; 3],
    coordinates: usize,
    flags: u32,
}

const fn geometry(
    name: &'static str,
    extent: [u64; 3],
    coordinates: usize,
    flags: u32,
) -> Geometry {
    Geometry {
        name,
        extent,
        coordinates,
        flags,
    }
}

/// Extents that are no powers of two, so that positions divided by them round.
const GEOMETRIES: [Geometry; 5] = [
    geometry("1d", [11, 0, 0], 1, 0),
    geometry("2d", [8, 5, 0], 2, 0),
    geometry("3d", [5, 4, 3], 3, 0),
    geometry("a1d", [7, 0, 3], 1, LAYERED),
    geometry("a2d", [8, 5, 3], 2, LAYERED),
];
const CUBES: [Geometry; 2] = [
    geometry("cube", [4, 4, 6], 3, CUBEMAP),
    geometry("acube", [4, 4, 12], 3, CUBEMAP | LAYERED),
];

impl Geometry {
    fn is_layered(&self) -> bool {
        self.flags & LAYERED != 0
    }

    fn picture(&self) -> Picture {
        Picture::new(self.extent, Format::Single, 1, self.flags)
    }

    /// Returns the class of the layer, if there is one, and of each coordinate.
    fn operands(&self, component: impl Fn(usize) -> Class) -> Vec<Class> {
        let layer = Index {
            first: -1,
            count: 6,
            step: 1,
        };
        let layer = self.is_layered().then_some(layer);
        layer
            .into_iter()
            .chain((0..self.coordinates).map(component))
            .collect()
    }

    fn coordinates(&self, normalized: bool) -> Vec<Class> {
        self.operands(|dimension| Coordinate {
            extent: u8::try_from(self.extent[dimension]).unwrap_or(u8::MAX),
            normalized,
        })
    }

    fn directions(&self) -> Vec<Class> {
        self.operands(|_| Direction)
    }

    fn indices(&self) -> Vec<Class> {
        self.operands(|dimension| Index {
            first: -3,
            count: u8::try_from(self.extent[dimension] + 6).unwrap_or(u8::MAX),
            step: 1,
        })
    }

    /// Returns `{%i0, %i1}`, padded to a length that vectors have.
    fn place(&self) -> String {
        let count = self.coordinates + usize::from(self.is_layered());
        if count == 1 {
            return "{%i0}".to_owned();
        }
        let mut names: Vec<_> = (0..count).map(|i| format!("%i{i}")).collect();
        if count == 3 {
            names.push("%i2".to_owned());
        }
        format!("{{{}}}", names.join(", "))
    }
}

fn sampling(filter: u32, mode: u32, flags: u32) -> Sampling {
    Sampling {
        address_modes: [mode; 3],
        filter,
        level_filter: filter_mode::POINT,
        flags,
        anisotropy: 0,
        level_bias: 0.0,
        level_clamp: [0.0, 0.0],
        border: [99.0_f32, -2.0, 0.5, 7.0].map(f32::to_bits),
    }
}

const MODES: [(u32, &str); 4] = [
    (address_mode::WRAP, "wrap"),
    (address_mode::CLAMP, "clamp"),
    (address_mode::MIRROR, "mirror"),
    (address_mode::BORDER, "border"),
];
const FILTERS: [(u32, &str); 2] = [
    (filter_mode::POINT, "point"),
    (filter_mode::LINEAR, "linear"),
];

/// Returns the form of a fetch whose results are the first `results` channels.
fn fetch(op: &str, note: &str, inputs: &[Class], results: usize, operands: &str) -> Form {
    let names = ["%o0", "%o1", "%o2", "%o3"];
    let (names, outputs) = match results {
        1 => ("%o0, _, _, _".to_owned(), vec![32]),
        count => (names[..count].join(", "), vec![32; count]),
    };
    let body = format!("{op} {{{names}}}, {operands};");
    Form::new(&format!("{op} {note}"), inputs, &outputs, body).rows(ROWS)
}

/// Returns forms of all geometries, filters and addressing modes, and fetches by index.
pub fn modes() -> Vec<Form> {
    let mut forms = Vec::new();
    for geometry in &GEOMETRIES {
        let op = format!("tex.{}.v4.f32.f32", geometry.name);
        for (filter, filter_name) in FILTERS {
            for (mode, mode_name) in MODES {
                for normalized in [false, true] {
                    let flags = if normalized {
                        texture_flags::NORMALIZED_COORDINATES
                    } else {
                        0
                    };
                    let note = format!(
                        "{filter_name} {mode_name}{}",
                        if normalized { " normalized" } else { "" }
                    );
                    let inputs = geometry.coordinates(normalized);
                    let operands = format!("[%h, {}]", geometry.place());
                    let object = Object::Texture(geometry.picture(), sampling(filter, mode, flags));
                    forms.push(fetch(&op, &note, &inputs, 1, &operands).with(object));
                }
            }
        }
        // CUDA C++ fetches by index from linear memory only (see `formats`). The GPU fetches so from planes and
        // volumes too; from lines and layers it reads zeros.
        if geometry.coordinates == 1 || geometry.is_layered() {
            continue;
        }
        for (mode, name) in MODES {
            let op = format!("tex.{}.v4.f32.s32", geometry.name);
            let operands = format!("[%h, {}]", geometry.place());
            let object = Object::Texture(geometry.picture(), sampling(filter_mode::POINT, mode, 0));
            forms.push(fetch(&op, name, &geometry.indices(), 1, &operands).with(object));
        }
    }
    // Each dimension has its own mode.
    let geometry = &GEOMETRIES[2];
    let mixed = Sampling {
        address_modes: [
            address_mode::WRAP,
            address_mode::MIRROR,
            address_mode::BORDER,
        ],
        ..sampling(
            filter_mode::LINEAR,
            address_mode::WRAP,
            texture_flags::NORMALIZED_COORDINATES,
        )
    };
    let object = Object::Texture(geometry.picture(), mixed);
    let operands = format!("[%h, {}]", geometry.place());
    let inputs = geometry.coordinates(true);
    forms.push(fetch("tex.3d.v4.f32.f32", "mixed", &inputs, 1, &operands).with(object));
    // With a predicate: whether the texels are in memory.
    let geometry = &GEOMETRIES[1];
    let object = Object::Texture(
        geometry.picture(),
        sampling(filter_mode::POINT, address_mode::CLAMP, 0),
    );
    let op = "tex.2d.v4.f32.f32";
    let body = format!("{op} {{%o0, _, _, _}}|%o1, [%h, {{%i0, %i1}}];");
    let inputs = geometry.coordinates(false);
    let form = Form::new(&format!("{op}|p"), &inputs, &[32, 1], body);
    forms.push(form.rows(32).with(object));
    forms
}

pub fn cubes() -> Vec<Form> {
    let mut forms = Vec::new();
    for geometry in &CUBES {
        let op = format!("tex.{}.v4.f32.f32", geometry.name);
        let operands = format!("[%h, {}]", geometry.place());
        for (filter, name) in FILTERS {
            for (flags, suffix) in [(0, ""), (texture_flags::SEAMLESS_CUBEMAP, " seamless")] {
                for (mode, mode_name) in [MODES[1], MODES[3]] {
                    let object = Object::Texture(
                        geometry.picture(),
                        sampling(filter, mode, flags | texture_flags::NORMALIZED_COORDINATES),
                    );
                    let note = format!("{name} {mode_name}{suffix}");
                    let inputs = geometry.directions();
                    forms.push(fetch(&op, &note, &inputs, 1, &operands).with(object));
                }
            }
        }
    }
    forms
}

const FORMATS: [(Format, &str); 8] = [
    (Format::Unsigned8, "u8"),
    (Format::Unsigned16, "u16"),
    (Format::Unsigned32, "u32"),
    (Format::Signed8, "s8"),
    (Format::Signed16, "s16"),
    (Format::Signed32, "s32"),
    (Format::Half, "f16"),
    (Format::Single, "f32"),
];

/// Returns forms of all texel formats and result types.
pub fn formats() -> Vec<Form> {
    let mut forms = Vec::new();
    let plane = [16, 16, 0];
    let at = [Coordinate {
        extent: 16,
        normalized: false,
    }; 2];
    // Each row fetches its own texel.
    let each = "shr.u32 %i1, %t, 3; and.b32 %i0, %t, 7;";
    for (format, name) in FORMATS {
        let is_float = matches!(format, Format::Half | Format::Single);
        let is_wide = matches!(format, Format::Unsigned32 | Format::Signed32);
        let whole = match name.as_bytes()[0] {
            b'f' => "f32",
            b's' => "s32",
            _ => "u32",
        };
        for channels in [1, 2, 4] {
            let picture = |extent| Picture::new(extent, format, channels, 0);
            let note = |rest: &str| format!("of {name}x{channels}{rest}");
            let bits = if is_float {
                0
            } else {
                texture_flags::READ_AS_INTEGER
            };
            let border = sampling(filter_mode::POINT, address_mode::BORDER, bits);
            let op = format!("tex.2d.v4.{whole}.f32");
            let object = Object::Texture(picture(plane), border);
            forms.push(fetch(&op, &note(""), &at, 4, "[%h, {%i0, %i1}]").with(object));
            if !is_wide {
                let unit = sampling(filter_mode::LINEAR, address_mode::BORDER, 0);
                let object = Object::Texture(picture(plane), unit);
                let op = "tex.2d.v4.f32.f32";
                let note = note(" linear");
                forms.push(fetch(op, &note, &at, 4, "[%h, {%i0, %i1}]").with(object));
            }
            if !is_wide && !is_float {
                // Every value of a byte.
                let unit = sampling(filter_mode::POINT, address_mode::CLAMP, 0);
                let object = Object::Texture(picture([8, 12, 0]), unit);
                let op = "tex.2d.v4.f32.s32";
                let mut form = fetch(
                    op,
                    &note(" as parts of 1"),
                    &[SmallInt; 2],
                    4,
                    "[%h, {%i0, %i1}]",
                );
                form.body = format!("{each} {}", form.body);
                forms.push(form.with(object));
            }
            if name == "u8" {
                for filter in FILTERS {
                    let curve = sampling(filter.0, address_mode::CLAMP, texture_flags::SRGB);
                    let object = Object::Texture(picture([8, 12, 0]), curve);
                    let note = note(&format!(" sRGB {}", filter.1));
                    let op = "tex.2d.v4.f32.f32";
                    forms.push(fetch(op, &note, &at, 4, "[%h, {%i0, %i1}]").with(object));
                }
            }
            let line = sampling(filter_mode::POINT, address_mode::CLAMP, bits);
            let memory = picture([24, 0, 0]).from(Source::Linear);
            let index = [Index {
                first: -3,
                count: 30,
                step: 1,
            }];
            let op = format!("tex.1d.v4.{whole}.s32");
            let object = Object::Texture(memory, line);
            let note = note(" in memory");
            forms.push(fetch(&op, &note, &index, 4, "[%h, {%i0}]").with(object));
        }
    }
    for (filter, name) in FILTERS {
        for (mode, mode_name) in MODES {
            let rows = Picture::new([11, 6, 0], Format::Single, 1, 0).from(Source::Rows);
            let object = Object::Texture(
                rows,
                sampling(filter, mode, texture_flags::NORMALIZED_COORDINATES),
            );
            let inputs = [11, 6].map(|extent| Coordinate {
                extent,
                normalized: true,
            });
            let note = format!("{name} {mode_name} of rows in memory");
            let op = "tex.2d.v4.f32.f32";
            forms.push(fetch(op, &note, &inputs, 1, "[%h, {%i0, %i1}]").with(object));
        }
    }
    for (format, name) in [FORMATS[0], FORMATS[6], FORMATS[7]] {
        let picture = Picture::new(plane, format, 4, 0);
        for filter in FILTERS {
            let object = Object::Texture(picture, sampling(filter.0, address_mode::CLAMP, 0));
            let note = format!("of {name} {}", filter.1);
            let mut halves = fetch("tex.2d.v4.f16.f32", &note, &at, 4, "[%h, {%i0, %i1}]");
            halves.outputs = vec![16; 4];
            forms.push(halves.with(object));
            let op = "tex.2d.v2.f16x2.f32";
            forms.push(fetch(op, &note, &at, 2, "[%h, {%i0, %i1}]").with(object));
        }
    }
    forms
}

/// Returns forms with levels of detail.
pub fn levels() -> Vec<Form> {
    let mut forms = Vec::new();
    let [line, plane, volume, lines, planes] = &GEOMETRIES;
    for (geometry, extent, count) in [
        (line, [16, 0, 0], 4),
        (plane, [16, 8, 0], 4),
        (volume, [8, 8, 4], 3),
        (lines, [8, 0, 3], 3),
        (planes, [8, 4, 3], 3),
        (&CUBES[0], [8, 8, 6], 3),
    ] {
        let picture = Picture {
            extent,
            source: Source::Array { levels: count },
            ..geometry.picture()
        };
        let directions = geometry.flags & CUBEMAP != 0;
        let sized = Geometry {
            extent,
            ..GEOMETRIES[0]
        };
        let sized = Geometry {
            name: geometry.name,
            coordinates: geometry.coordinates,
            flags: geometry.flags,
            ..sized
        };
        let at = if directions {
            sized.directions()
        } else {
            sized.coordinates(true)
        };
        let place = sized.place();
        for (level_filter, level_name) in FILTERS {
            for (filter, name) in FILTERS {
                for (bias, clamp, note) in [
                    (0.0, [0.0, 20.0], ""),
                    (0.75, [0.5, 1.75], " biased and clamped"),
                ] {
                    let sampling = Sampling {
                        level_filter,
                        level_bias: bias,
                        level_clamp: clamp,
                        ..sampling(
                            filter,
                            address_mode::CLAMP,
                            texture_flags::NORMALIZED_COORDINATES,
                        )
                    };
                    let object = Object::Texture(picture, sampling);
                    let note = format!("{name}, levels {level_name}{note}");
                    let op = format!("tex.level.{}.v4.f32.f32", geometry.name);
                    let mut inputs = at.clone();
                    inputs.push(Detail);
                    let detail = inputs.len() - 1;
                    let operands = format!("[%h, {place}], %i{detail}");
                    forms.push(fetch(&op, &note, &inputs, 1, &operands).with(object));
                    for op in ["tex", "tex.base"] {
                        let op = format!("{op}.{}.v4.f32.f32", geometry.name);
                        let operands = format!("[%h, {place}]");
                        forms.push(fetch(&op, &note, &at, 1, &operands).with(object));
                    }
                    if directions || filter == filter_mode::LINEAR {
                        continue;
                    }
                    let op = format!("tex.grad.{}.v4.f32.f32", geometry.name);
                    let mut inputs = at.clone();
                    let first = inputs.len();
                    inputs.extend(vec![Direction; 2 * geometry.coordinates]);
                    let step = |from: usize| {
                        let names: Vec<_> = (from..from + geometry.coordinates)
                            .map(|i| format!("%i{i}"))
                            .collect();
                        match names.len() {
                            1 => format!("{{{}}}", names[0]),
                            2 => format!("{{{}}}", names.join(", ")),
                            _ => format!("{{{}, {}}}", names.join(", "), names[2]),
                        }
                    };
                    let operands = format!(
                        "[%h, {place}], {}, {}",
                        step(first),
                        step(first + geometry.coordinates)
                    );
                    forms.push(fetch(&op, &note, &inputs, 1, &operands).with(object));
                }
            }
        }
    }
    forms
}

pub fn gathers() -> Vec<Form> {
    let mut forms = Vec::new();
    for channel in ["r", "g", "b", "a"] {
        for (mode, name) in MODES {
            for normalized in [false, true] {
                let flags = if normalized {
                    texture_flags::NORMALIZED_COORDINATES
                } else {
                    0
                };
                let picture = Picture::new([8, 5, 0], Format::Single, 4, TEXTURE_GATHER);
                let object = Object::Texture(picture, sampling(filter_mode::POINT, mode, flags));
                let inputs = GEOMETRIES[1].coordinates(normalized);
                let note = format!("{name}{}", if normalized { " normalized" } else { "" });
                let op = format!("tld4.{channel}.2d.v4.f32.f32");
                forms.push(fetch(&op, &note, &inputs, 4, "[%h, {%i0, %i1}]").with(object));
            }
        }
        for (format, name, ty) in [
            (Format::Unsigned8, "u8", "u32"),
            (Format::Signed16, "s16", "s32"),
            (Format::Half, "f16", "f32"),
        ] {
            let bits = if ty == "f32" {
                0
            } else {
                texture_flags::READ_AS_INTEGER
            };
            for channels in [1, 2, 4] {
                let picture = Picture::new([8, 5, 0], format, channels, TEXTURE_GATHER);
                let sampling = sampling(filter_mode::POINT, address_mode::CLAMP, bits);
                let inputs = GEOMETRIES[1].coordinates(false);
                let op = format!("tld4.{channel}.2d.v4.{ty}.f32");
                let note = format!("of {name}x{channels}");
                let form = fetch(&op, &note, &inputs, 4, "[%h, {%i0, %i1}]");
                forms.push(form.rows(32).with(Object::Texture(picture, sampling)));
            }
        }
    }
    for (geometry, inputs) in [
        (&GEOMETRIES[4], GEOMETRIES[4].coordinates(true)),
        (&CUBES[0], CUBES[0].directions()),
        (&CUBES[1], CUBES[1].directions()),
    ] {
        let sampling = sampling(
            filter_mode::POINT,
            address_mode::CLAMP,
            texture_flags::NORMALIZED_COORDINATES,
        );
        let op = format!("tld4.r.{}.v4.f32.f32", geometry.name);
        let operands = format!("[%h, {}]", geometry.place());
        let object = Object::Texture(geometry.picture(), sampling);
        forms.push(fetch(&op, "clamp", &inputs, 4, &operands).with(object));
    }
    forms
}

/// Returns the queries that a GPU's driver accepts; it rejects `.array_size`, `.num_mipmap_levels` and
/// `.normalized_coords`.
pub fn queries() -> Vec<Form> {
    let mut forms = Vec::new();
    let input = [SmallInt];
    for geometry in GEOMETRIES.iter().chain(&CUBES) {
        for what in ["width", "height", "depth"] {
            let op = format!("txq.{what}.b32");
            let sampling = sampling(
                filter_mode::POINT,
                address_mode::CLAMP,
                texture_flags::NORMALIZED_COORDINATES,
            );
            let object = Object::Texture(geometry.picture(), sampling);
            let name = format!("{op} of {}", geometry.name);
            let body = format!("{op} %o0, [%h];");
            forms.push(Form::new(&name, &input, &[32], body).rows(1).with(object));
            let op = format!("suq.{what}.b32");
            let picture = Picture {
                flags: geometry.flags | wormhole_device::array::SURFACE_LDST,
                ..geometry.picture()
            };
            let name = format!("{op} of {}", geometry.name);
            let body = format!("{op} %o0, [%h];");
            let form = Form::new(&name, &input, &[32], body).rows(1);
            forms.push(form.with(Object::Surface(picture)));
        }
    }
    for what in ["width", "height", "depth"] {
        let picture =
            Picture::new([13, 6, 5], Format::Single, 1, 0).from(Source::Array { levels: 3 });
        let op = format!("txq.level.{what}.b32");
        let sampling = sampling(
            filter_mode::POINT,
            address_mode::CLAMP,
            texture_flags::NORMALIZED_COORDINATES,
        );
        let index = [Index {
            first: 0,
            count: 3,
            step: 1,
        }];
        let body = format!("{op} %o0, [%h], %i0;");
        let form = Form::new(&op, &index, &[32], body).rows(32);
        forms.push(form.with(Object::Texture(picture, sampling)));
    }
    forms
}
