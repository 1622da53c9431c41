//! Cubes: the face and the position that a direction meets, and the texels beyond a face's edges.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "places on a face become indices inside it"
)]

/// Number of faces of a cube.
pub(super) const FACES: u32 = 6;

/// Returns the face of a cube in a direction, and the position on it from 0 to 1.
pub(super) fn face([x, y, z]: [f32; 3]) -> (u32, [f32; 3]) {
    let (face, major, s, t) = if [x, y, z] == [0.0; 3] {
        (0, 0.0, 0.0, 0.0)
    } else if z.abs() >= x.abs() && z.abs() >= y.abs() {
        if z >= 0.0 {
            (4, z, x, -y)
        } else {
            (5, -z, -x, -y)
        }
    } else if y.abs() >= x.abs() {
        if y >= 0.0 {
            (2, y, x, z)
        } else {
            (3, -y, x, -z)
        }
    } else if x >= 0.0 {
        (0, x, -z, -y)
    } else {
        (1, -x, z, -y)
    };
    (
        face,
        [(s / major + 1.0) / 2.0, (t / major + 1.0) / 2.0, 0.0],
    )
}

/// Returns the direction of a position on a face, both coordinates from -1 to 1.
fn direction(face: u32, s: f32, t: f32) -> [f32; 3] {
    match face {
        0 => [1.0, -t, -s],
        1 => [-1.0, -t, s],
        2 => [s, 1.0, t],
        3 => [s, -1.0, -t],
        4 => [s, -t, 1.0],
        _ => [-s, -t, -1.0],
    }
}

/// Texels that represent one, in equal parts: their layers and positions.
#[derive(Debug)]
pub(super) struct Shares {
    pub texels: [(u32, [u32; 2]); 3],
    pub count: u32,
}

/// Returns the texels that represent a position on a face or next to it, of a cube with edges of `extent` texels.
/// Beyond an edge it is the texel of the adjacent face; at a corner there is none, and the three around it count
/// equally.
pub(super) fn neighbours(layer: u32, [x, y]: [i64; 2], extent: u32) -> Shares {
    let last = i64::from(extent) - 1;
    let inside = |at: i64| (0..=last).contains(&at);
    let near = |[x, y]: [i64; 2]| {
        let [x, y] = [x, y].map(|at| at.clamp(-1, last + 1));
        let place = |at: i64| (2 * at + 1) as f32 / extent as f32 - 1.0;
        let (other, [s, t, _]) = face(direction(layer % FACES, place(x), place(y)));
        let index = |part: f32| ((part * extent as f32) as u32).min(extent - 1);
        (layer - layer % FACES + other, [index(s), index(t)])
    };
    if inside(x) && inside(y) {
        let here = (layer, [x as u32, y as u32]);
        return Shares {
            texels: [here; 3],
            count: 1,
        };
    }
    if inside(x) || inside(y) {
        return Shares {
            texels: [near([x, y]); 3],
            count: 1,
        };
    }
    let [cx, cy] = [x, y].map(|at| at.clamp(0, last));
    Shares {
        texels: [
            (layer, [cx as u32, cy as u32]),
            near([x, cy]),
            near([cx, y]),
        ],
        count: 3,
    }
}
