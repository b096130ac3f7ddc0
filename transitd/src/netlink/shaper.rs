//! The limit of bandwidth at one end of a veth: a token bucket (tbf) as its queueing discipline. Inside is `fq_codel`,
//! where the kernel has it, so that flows share the limit and queues stay short; else a queue of bytes.
//!
//! Invariant: only a queueing discipline that this module made is removed, known by its handle.

use std::sync::atomic::{AtomicBool, Ordering};

use futures::StreamExt;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::LinkAttribute;
use netlink_packet_route::tc::{TcAttribute, TcHandle, TcMessage, TcOption};
use rtnetlink::Handle;
use rtnetlink::packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload,
};
use thuban_rows::ByteRate;
use tracing::warn;

use super::{NetlinkError, error_number, failed, find_link};

/// The handle of the token bucket. Numbers from 0x8000 on are the kernel's own choice.
const BUCKET: TcHandle = TcHandle {
    major: 0x6081,
    minor: 0,
};
/// The only class of the bucket, which the queue inside has as its parent.
const CLASS: TcHandle = TcHandle {
    major: 0x6081,
    minor: 1,
};
const QUEUE: TcHandle = TcHandle {
    major: 0x6082,
    minor: 0,
};

/// TCA_TBF_PARMS, TCA_TBF_RATE64 and TCA_TBF_BURST of linux/pkt_sched.h.
const PARAMETERS: u16 = 1;
const RATE: u16 = 4;
const BURST: u16 = 6;
/// TC_LINKLAYER_ETHERNET of linux/pkt_sched.h.
const ETHERNET: u8 = 1;

/// The largest frame that a pod sends in one piece (GSO). A bucket with less room has the kernel cut it.
const LARGEST_FRAME: u64 = 64 << 10;
/// The burst beyond that: what the rate allows in 10 ms.
const BURSTS_A_SECOND: u64 = 100;
/// The burst of low rates: what the rate allows in 40 ms, so that the first second has 4 % more than the rate.
const SLOW_BURSTS_A_SECOND: u64 = 25;
/// The least burst, in packets of the interface: a larger one would never leave.
const LEAST_PACKETS: u64 = 2;
/// Bytes of an Ethernet header with VLAN tags.
const ETHERNET_HEADER: u64 = 22;
/// The MTU of an interface that doesn't say its own.
const LARGEST_MTU: u32 = 65_535;
/// What may wait at least: two of the largest frames, and two more if the rate allows them in 200 ms. With less room
/// most of a frame is dropped as a stream begins, and the receiver waits until it is sent again.
const FRAMES: u64 = 2 * LARGEST_FRAME;
const MORE_FRAMES_A_SECOND: u64 = 5;
/// What may wait besides these frames or a burst: what the rate allows in 50 ms.
const QUEUES_A_SECOND: u64 = 20;
/// The largest burst: at this size no rate that a veth reaches is held up.
const MAX_BURST: u64 = 256 << 20;
/// The longest queue.
const MAX_QUEUE: u64 = 1 << 30;

/// Whether a limit was ever set here with `fq_codel` inside.
static HAS_HAD_FQ_CODEL: AtomicBool = AtomicBool::new(false);
/// Whether one was set without, which the log then says once. Each limit asks for `fq_codel` again: a pod with rights
/// on its network may have caused the failure for itself.
static HAS_LACKED_FQ_CODEL: AtomicBool = AtomicBool::new(false);

/// Returns the queue inside of limits on this node. `None`: there was no limit yet. One that worked proves that the
/// kernel has `fq_codel`.
pub fn queue() -> Option<&'static str> {
    if HAS_HAD_FQ_CODEL.load(Ordering::Relaxed) {
        Some("fq_codel")
    } else {
        HAS_LACKED_FQ_CODEL.load(Ordering::Relaxed).then_some("fifo")
    }
}

/// Sizes of a token bucket, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bucket {
    /// A second.
    rate: u64,
    burst: u32,
    /// The longest queue.
    limit: u32,
}

impl Bucket {
    /// `mtu`: the interface's.
    fn of(rate: ByteRate, mtu: u32) -> Self {
        let rate = rate.get();
        let least = LEAST_PACKETS * (u64::from(mtu) + ETHERNET_HEADER);
        let most = (LARGEST_FRAME + rate / BURSTS_A_SECOND).min(MAX_BURST);
        let burst = (rate / SLOW_BURSTS_A_SECOND).min(most).max(least);
        let frames = FRAMES + (rate / MORE_FRAMES_A_SECOND).min(FRAMES);
        let limit = (burst.max(frames) + rate / QUEUES_A_SECOND).min(MAX_QUEUE);
        Self {
            rate,
            burst: burst as u32,
            limit: limit as u32,
        }
    }

    /// Returns the options of the request. The kernel takes burst and rate from attributes of their own, because the
    /// structure's fields are too small for high and low rates.
    fn options(self) -> Vec<TcOption> {
        // struct tc_tbf_qopt: two struct tc_ratespec, of which the second is no peak rate, and limit, buffer and mtu.
        let mut parameters = vec![0; 36];
        parameters[1] = ETHERNET;
        parameters[8..12].copy_from_slice(&u32::try_from(self.rate).unwrap_or(u32::MAX).to_ne_bytes());
        parameters[24..28].copy_from_slice(&self.limit.to_ne_bytes());
        let option = |kind, value: &[u8]| TcOption::Other(DefaultNla::new(kind, value.to_vec()));
        vec![
            option(PARAMETERS, &parameters),
            option(RATE, &self.rate.to_ne_bytes()),
            option(BURST, &self.burst.to_ne_bytes()),
        ]
    }
}

/// Makes the limit of what goes out by a link this one; none: no limit. The link is its index and its name.
pub async fn set(handle: &Handle, link: (u32, &str), rate: Option<ByteRate>) -> Result<(), NetlinkError> {
    match rate {
        Some(rate) => limit(handle, link, rate).await,
        None => release(handle, link).await,
    }
}

/// Limits what goes out by a link, or changes the limit.
pub async fn limit(handle: &Handle, (index, name): (u32, &str), rate: ByteRate) -> Result<(), NetlinkError> {
    let link = find_link(handle, name).await?;
    let mut attributes = link.iter().flat_map(|link| &link.attributes);
    let mtu = attributes.find_map(|attribute| match attribute {
        LinkAttribute::Mtu(mtu) => Some(*mtu),
        _ => None,
    });
    let options = Bucket::of(rate, mtu.unwrap_or(LARGEST_MTU)).options();
    let bucket = message(index, BUCKET, TcHandle::ROOT, "tbf", options);
    let flags = NLM_F_CREATE | NLM_F_REPLACE;
    let limited = request(handle, RouteNetlinkMessage::NewQueueDiscipline(bucket), flags).await;
    limited.map_err(failed("limit (by the kernel's tbf) the bandwidth of", name))?;
    let queue = message(index, QUEUE, CLASS, "fq_codel", vec![]);
    let queued = request(handle, RouteNetlinkMessage::NewQueueDiscipline(queue), flags).await;
    let Err(error) = queued else {
        HAS_HAD_FQ_CODEL.store(true, Ordering::Relaxed);
        return Ok(());
    };
    if !HAS_LACKED_FQ_CODEL.swap(true, Ordering::Relaxed) {
        warn!(
            error = &error as &dyn std::error::Error,
            "fq_codel can't be had: pods with a limit of bandwidth have a plain queue"
        );
    }
    Ok(())
}

/// Removes the limit, if there is one.
async fn release(handle: &Handle, (index, name): (u32, &str)) -> Result<(), NetlinkError> {
    let mut bucket = TcMessage::with_index(index.cast_signed());
    (bucket.header.handle, bucket.header.parent) = (BUCKET, TcHandle::ROOT);
    match request(handle, RouteNetlinkMessage::DelQueueDiscipline(bucket), 0).await {
        // There is none, or it is somebody else's.
        Err(error) if matches!(error_number(&error), Some(libc::ENOENT | libc::EINVAL)) => Ok(()),
        released => released.map_err(failed("remove the limit of the bandwidth of", name)),
    }
}

fn message(index: u32, own: TcHandle, parent: TcHandle, kind: &str, options: Vec<TcOption>) -> TcMessage {
    let mut message = TcMessage::with_index(index.cast_signed());
    (message.header.handle, message.header.parent) = (own, parent);
    message.attributes.push(TcAttribute::Kind(kind.to_owned()));
    if !options.is_empty() {
        message.attributes.push(TcAttribute::Options(options));
    }
    message
}

/// Sends a request of traffic control. The crate's own requests for queueing disciplines take no options.
async fn request(handle: &Handle, message: RouteNetlinkMessage, flags: u16) -> Result<(), rtnetlink::Error> {
    let mut request = NetlinkMessage::from(message);
    request.header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
    let mut answers = handle.clone().request(request)?;
    while let Some(answer) = answers.next().await {
        if let NetlinkPayload::Error(error) = answer.payload
            && error.code.is_some()
        {
            return Err(rtnetlink::Error::NetlinkError(error));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_core::Nla;

    use super::*;

    #[test]
    fn a_bucket_has_room_for_packets_and_little_more_than_the_rate() {
        let bucket = |rate| {
            let Bucket { rate, burst, limit } = Bucket::of(ByteRate::new(rate).unwrap(), 1450);
            (rate, burst, limit)
        };
        assert_eq!(bucket(125), (125, 2 * 1472, 131_103));
        assert_eq!(bucket(125_000), (125_000, 5000, 162_322));
        assert_eq!(bucket(1_250_000), (1_250_000, 50_000, 324_644));
        assert_eq!(bucket(125_000_000), (125_000_000, 1_315_536, 7_565_536));
        let highest = 125_000_000_000_000;
        assert_eq!(bucket(highest), (highest, 256 << 20, 1 << 30));
    }

    #[test]
    fn rates_beyond_32_bits_are_told_whole() {
        let options = Bucket::of(ByteRate::new(5_000_000_000).unwrap(), 1450).options();
        let value = |option: &TcOption| {
            let mut value = vec![0; option.value_len()];
            option.emit_value(&mut value);
            value
        };
        let [parameters, rate, burst] = &options[..] else {
            panic!("{options:?}")
        };
        assert_eq!(value(parameters).len(), 36);
        assert_eq!(value(parameters)[8..12], [0xff; 4]);
        assert_eq!(value(rate), 5_000_000_000_u64.to_ne_bytes());
        assert_eq!(value(burst), (LARGEST_FRAME as u32 + 50_000_000).to_ne_bytes());
    }
}
