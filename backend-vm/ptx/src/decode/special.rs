//! Finds special registers by name (PTX ISA 10).

use super::insn::Special;

/// Returns whether a special register describes the block's cluster, which has one block on this
/// device.
pub(crate) fn is_of_clusters(name: &str) -> bool {
    name.contains("cluster")
}

/// Returns the special register `name` (with its `%`).
pub(crate) fn find(name: &str) -> Option<Special> {
    fn axis(suffix: &str) -> Option<u8> {
        match suffix {
            ".x" => Some(0),
            ".y" => Some(1),
            ".z" => Some(2),
            ".w" => Some(3),
            _ => None,
        }
    }
    if name == "WARP_SZ" {
        return Some(Special::Constant(32));
    }
    let name = name.strip_prefix('%')?;
    if let Some((family, suffix)) = name.find('.').map(|dot| name.split_at(dot)) {
        let axis = axis(suffix)?;
        return Some(match family {
            "tid" => Special::Tid(axis),
            "ntid" => Special::Ntid(axis),
            // A launch without clusters counts as one with clusters of one block each.
            "ctaid" | "clusterid" => Special::Ctaid(axis),
            "nctaid" | "nclusterid" => Special::Nctaid(axis),
            "cluster_ctaid" => Special::Constant(0),
            "cluster_nctaid" => Special::Constant(u64::from(axis < 3)),
            _ => return None,
        });
    }
    Some(match name {
        "laneid" => Special::LaneId,
        "warpid" => Special::WarpId,
        "nwarpid" => Special::NwarpId,
        "smid" => Special::SmId,
        "nsmid" => Special::NsmId,
        "gridid" => Special::GridId,
        "clock" => Special::Clock,
        "clock_hi" => Special::ClockHi,
        "clock64" => Special::Clock64,
        "globaltimer" => Special::GlobalTimer,
        "globaltimer_lo" => Special::GlobalTimerLo,
        "globaltimer_hi" => Special::GlobalTimerHi,
        "lanemask_eq" => Special::LaneMaskEq,
        "lanemask_le" => Special::LaneMaskLe,
        "lanemask_lt" => Special::LaneMaskLt,
        "lanemask_ge" => Special::LaneMaskGe,
        "lanemask_gt" => Special::LaneMaskGt,
        "dynamic_smem_size" => Special::DynamicShared,
        "total_smem_size" | "aggr_smem_size" => Special::TotalShared,
        "cluster_ctarank" | "current_graph_exec" => Special::Constant(0),
        "cluster_nctarank" => Special::Constant(1),
        "reserved_smem_offset_begin"
        | "reserved_smem_offset_end"
        | "reserved_smem_offset_cap"
        | "reserved_smem_offset_0"
        | "reserved_smem_offset_1" => Special::Constant(0),
        // Performance monitors, which are never set up, read 0.
        "pm0" | "pm1" | "pm2" | "pm3" | "pm4" | "pm5" | "pm6" | "pm7" | "pm0_64" | "pm1_64"
        | "pm2_64" | "pm3_64" | "pm4_64" | "pm5_64" | "pm6_64" | "pm7_64" => Special::Constant(0),
        _ => {
            let index = name.strip_prefix("envreg")?.parse::<u32>().ok()?;
            match index {
                // Cooperative launches find their grid's barrier through these two.
                1 | 2 => Special::EnvReg(index == 2),
                0..=31 => Special::Constant(0),
                _ => return None,
            }
        }
    })
}
