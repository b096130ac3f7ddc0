//! Meters: how much an endpoint may send, and a VPC out of a droplet. Agents drop what is beyond.
//!
//! The queue at a pod's end of the veth holds the pod to its rate. A pod with rights on its network can send past that
//! queue, so the meter is a little wider: it drops nothing that came out of the queue.

/// Key of METERS.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MeterKey {
    /// [`METER_OF_ENDPOINT`] or [`METER_OF_VPC`].
    pub kind: u32,
    /// The interface of the attachment, or the VNI.
    pub id: u32,
}

/// [`MeterKey::kind`]: what one attachment sends.
pub const METER_OF_ENDPOINT: u32 = 0;
/// [`MeterKey::kind`]: what all attachments of a VPC send out of this droplet.
pub const METER_OF_VPC: u32 = 1;

impl MeterKey {
    pub const fn of_endpoint(interface: u32) -> Self {
        Self {
            kind: METER_OF_ENDPOINT,
            id: interface,
        }
    }

    pub const fn of_vpc(vni: u32) -> Self {
        Self {
            kind: METER_OF_VPC,
            id: vni,
        }
    }
}

/// METERS[key]: a rate, and how much of it is used up.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MeterEntry {
    /// Bytes per second; 0: no limit. Written by transitd.
    pub rate: u64,
    /// When all that was let through would have gone by at the rate, ns since boot. Written by agents.
    pub next: u64,
}

/// What a meter says of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metered {
    /// It is more than the rate allows.
    Beyond,
    /// It is let through, and [`MeterEntry::next`] grows by this.
    Later(u64),
    /// It is let through. The meter had a whole burst left, and [`MeterEntry::next`] becomes this.
    From(u64),
}

/// The most entries of METERS: one for each attachment, and as many VPCs.
pub const METERS_CAPACITY: u32 = 8192;
/// The bytes that an idle endpoint may send at once: four of the largest frames of a pod (GSO).
const BURST: u64 = 256 << 10;
/// What it may send at once besides, as time at the rate, ns. A CPU that stood still for so long gets frames of all
/// that time at once.
const BURST_TIME: u64 = 100_000_000;
const SECOND: u64 = 1_000_000_000;

impl MeterEntry {
    /// Returns a meter with a whole burst left.
    pub const fn new(rate: u64) -> Self {
        Self { rate, next: 0 }
    }

    /// Judges a frame of `length` bytes at the time `now`, ns since boot.
    #[inline(always)]
    pub const fn judge(&self, now: u64, length: u32) -> Metered {
        let Some(cost) = (length as u64 * SECOND).checked_div(self.rate) else {
            return Metered::Later(0);
        };
        if self.next > now {
            return Metered::Beyond;
        }
        let earliest = now.saturating_sub(BURST_TIME + BURST * SECOND / self.rate);
        if self.next < earliest {
            Metered::From(earliest + cost)
        } else {
            Metered::Later(cost)
        }
    }
}

const _: () = {
    assert!(size_of::<MeterKey>() == 8);
    assert!(size_of::<MeterEntry>() == 16);
};

#[cfg(feature = "user")]
mod pod {
    use super::{MeterEntry, MeterKey};

    // SAFETY: repr(C) of integers without implicit padding (sizes asserted above).
    unsafe impl aya::Pod for MeterKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for MeterEntry {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends frames of `length` bytes every `gap` ns for a time, and returns the bytes that are let through.
    fn passed(meter: &mut MeterEntry, from: u64, time: u64, gap: u64, length: u32) -> u64 {
        let mut bytes = 0;
        let mut now = from;
        while now < from + time {
            match meter.judge(now, length) {
                Metered::Beyond => {
                    now += gap;
                    continue;
                }
                Metered::Later(cost) => meter.next += cost,
                Metered::From(next) => meter.next = next,
            }
            bytes += u64::from(length);
            now += gap;
        }
        bytes
    }

    #[test]
    fn a_flood_gets_its_rate_and_one_burst() {
        for rate in [125, 125_000, 12_500_000, 1_250_000_000] {
            for length in [60, 1514, 65_549] {
                let mut meter = MeterEntry::new(rate);
                let gap = (u64::from(length) * SECOND / rate / 4).max(1);
                let time = gap * 20_000;
                let start = 10_000 * SECOND;
                let bytes = passed(&mut meter, start, time, gap, length);
                let allowed =
                    BURST + rate / 10 + (u128::from(rate) * u128::from(time) / u128::from(SECOND)) as u64;
                assert!(
                    bytes <= allowed + 2 * u64::from(length),
                    "{rate} {length}: {bytes} of {allowed}"
                );
                let least = allowed.min(20_000 * u64::from(length)) / 50 * 49;
                assert!(bytes >= least, "{rate} {length}: {bytes} of {least}");
            }
        }
    }

    #[test]
    fn what_stays_below_the_rate_passes_even_after_a_stop() {
        let rate = 1_250_000;
        let mut meter = MeterEntry::new(rate);
        let gap = 1514 * SECOND / rate + 1;
        let frames = 10_000;
        let sent = passed(&mut meter, 5 * SECOND, gap * frames, gap, 1514);
        assert_eq!(sent, frames * 1514);
        // A CPU stood still for 90 ms, and all frames of that time come at once.
        let now = 5 * SECOND + gap * frames + 90_000_000;
        let held = 90_000_000 / gap;
        assert_eq!(passed(&mut meter, now, held, 1, 1514), held * 1514);
    }

    #[test]
    fn without_a_rate_nothing_is_beyond() {
        let meter = MeterEntry {
            rate: 0,
            next: u64::MAX,
        };
        assert_eq!(meter.judge(5, 1514), Metered::Later(0));
        // The first second after boot has no earlier time.
        assert_eq!(MeterEntry::new(125).judge(5, 125), Metered::Later(SECOND));
    }
}
