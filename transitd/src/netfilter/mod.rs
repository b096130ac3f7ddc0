//! The work of the host's own stack for pods: packets that leave a VPC go in the node's name, answers find their pod,
//! and services whose backends are outside of their VPC are translated (ADR 13).
//!
//! Invariant: the tables `inet thuban`, `inet thuban-overlay`, `inet thuban-limits` and `inet thuban-policy` are each
//! written in one transaction. Known connections stay as they are. Nothing of other tables is changed.

mod affinity;
pub mod conntrack;
pub mod host;
pub mod limits;
pub mod nft;
pub mod node_ports;
pub mod overlay_port;
pub mod policy;
pub mod port_shares;
pub mod ruleset;
mod served;
mod template;
pub mod watch;

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use nix::sys::socket::{AddressFamily, SockFlag, SockProtocol, SockType, socket};
use std::time::Duration;
use thiserror::Error;
use thuban_common::host_stack::{NFT_LIMITS_TABLE, NFT_POLICY_TABLE, NFT_TABLE};
use tracing::warn;

use crate::boot;
use crate::boot_file::BootFile;
use host::Host;
use limits::{Limited, PodVpcs, VpcPorts};
use nft::Nft;
use node_ports::Told;
use overlay_port::OverlayPort;
use policy::Admission;
use port_shares::PortShares;
use ruleset::{OwnAddresses, ruleset};

#[derive(Debug, Error)]
pub enum NetfilterError {
    #[error("cannot run {program}; install it (Debian: nftables), or give its path by --nft", program = program.display())]
    Start {
        program: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "the kernel refused the rules, does it have nf_tables with NAT and limits (modprobe nf_tables nft_chain_nat nft_masq nft_connlimit nft_limit)? {0}"
    )]
    Refused(String),
    #[error(
        "{program} was ended after {seconds} s; does another program hold the kernel's lock of nftables? Look with: nft list tables",
        program = program.display()
    )]
    Late { program: PathBuf, seconds: u64 },
    #[error("the kernel has no netlink interface to conntrack (modprobe nf_conntrack_netlink)")]
    Conntrack(#[source] std::io::Error),
}

/// Opens a socket to netfilter.
fn netlink() -> std::io::Result<OwnedFd> {
    let socket = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?;
    Ok(socket)
}

/// Returns the names of the tables that are there: all tables of the node may have been flushed.
pub fn tables(nft: &Nft) -> BTreeSet<String> {
    let objects = objects(nft).unwrap_or_default();
    let tables = objects.iter().filter(|(kind, _)| kind == "table");
    let names = tables.filter_map(|(_, table)| table["name"].as_str().map(str::to_owned));
    names.collect()
}

/// Returns what the kernel has of the family, each with its kind; nothing if it can't be listed. Asked for less, nft
/// reads the elements of all sets as well, and there may be many.
fn objects(nft: &Nft) -> Option<Vec<(String, serde_json::Value)>> {
    let text = nft.list(&["-j", "-t", "list", "ruleset", "inet"])?;
    let mut listed: serde_json::Value = serde_json::from_slice(&text).ok()?;
    let objects = listed["nftables"].as_array_mut()?.iter_mut();
    let each = objects.filter_map(|object| std::mem::take(object.as_object_mut()?).into_iter().next());
    Some(each.collect())
}

/// Returns the packets that rules dropped, by reason.
pub fn dropped(nft: &Nft) -> Vec<(&'static str, u64)> {
    let others = [node_ports::STALE, policy::FROM_OUTSIDE];
    let objects = objects(nft).unwrap_or_default();
    let counters = objects.iter().filter(|(kind, counter)| {
        let is_own = |table| counter["table"] == table;
        kind == "counter"
            && [NFT_TABLE, NFT_LIMITS_TABLE, NFT_POLICY_TABLE]
                .into_iter()
                .any(is_own)
    });
    let counted = counters.filter_map(|(_, counter)| {
        let mut reasons = limits::REASONS.into_iter().chain(others);
        let reason = reasons.find(|reason| counter["name"] == *reason)?;
        Some((reason, counter["packets"].as_u64()?))
    });
    counted.collect()
}

/// How long nft may take for one set of ingress policies, when each is written by itself.
const SET_TIMEOUT: Duration = Duration::from_secs(10);
/// After so many sets that nft was late with, larger ones are not tried.
const MAX_LATE_SETS: usize = 3;

/// The tables as they were last written.
#[derive(Debug)]
pub struct Netfilter {
    nft: Nft,
    own: OwnAddresses,
    overlay_port: OverlayPort,
    /// Droplets that the kernel's table had when this transitd began.
    inherited: BTreeSet<Ipv4Addr>,
    written: Option<String>,
    /// Whether the table may have sets of clients.
    has_clients: bool,
    lease: node_ports::Told,
    /// When this transitd began, by the clock of the lease.
    begun: u64,
    written_overlay_port: Option<OverlayPort>,
    written_limits: Option<Limited>,
    written_admission: Option<Admission>,
    /// Sets of which the kernel does not take what they say of clients outside, or takes too long.
    refused_sets: BTreeSet<policy::Set>,
    shares: PortShares,
    shares_file: BootFile<PortShares>,
}

impl Netfilter {
    /// Returns tables that aren't written yet. VPCs keep the source ports that they have by the file.
    pub fn new(nft: Nft, own: OwnAddresses, shares_file: BootFile<PortShares>) -> Self {
        Self {
            nft,
            own,
            overlay_port: OverlayPort::default(),
            inherited: BTreeSet::new(),
            written: None,
            has_clients: true,
            lease: node_ports::Told::Unknown,
            begun: boot::nanoseconds(),
            written_overlay_port: None,
            written_limits: None,
            written_admission: None,
            refused_sets: BTreeSet::new(),
            shares: shares_file.load().unwrap_or_default(),
            shares_file,
        }
    }

    /// Makes the table if it isn't there, and checks whether the kernel has what else is needed. A table of an earlier
    /// transitd stays until the operator's rows are here.
    pub fn ensure(&mut self) -> Result<(), NetfilterError> {
        // No interface has number 0. This call finds out before the first DEL does.
        conntrack::forget(0).map_err(NetfilterError::Conntrack)?;
        self.inherited = overlay_port::droplets(&self.nft);
        let there = tables(&self.nft);
        if !there.contains(NFT_POLICY_TABLE) {
            self.admit(Admission::default())?;
        }
        if there.contains(NFT_TABLE) {
            return Ok(());
        }
        self.set(ruleset(std::iter::empty(), &Host::default(), self.own).text, 0)
    }

    /// Sets whether the overlay's port is this node's alone, from the next [`Self::protect_port`] on.
    pub fn claim_port(&mut self, is_claimed: bool) {
        self.overlay_port.is_claimed = is_claimed;
    }

    /// Keeps all but this node's own programs from the overlay's port. `droplets`: the known ones. Unless `are_all`,
    /// the droplets that an earlier transitd knew count too.
    pub fn protect_port(
        &mut self,
        droplets: BTreeSet<Ipv4Addr>,
        are_all: bool,
    ) -> Result<(), NetfilterError> {
        let inherited = self.inherited.iter().filter(|_| !are_all).copied();
        let droplets = droplets.into_iter().chain(inherited);
        self.overlay_port.droplets = droplets.filter(|droplet| *droplet != self.own.underlay).collect();
        if self.written_overlay_port.as_ref() == Some(&self.overlay_port) {
            return Ok(());
        }
        self.written_overlay_port = None;
        self.nft.write(&self.overlay_port.ruleset())?;
        self.written_overlay_port = Some(self.overlay_port.clone());
        Ok(())
    }

    /// Bounds the connections of these pods, each by itself and all of a VPC, and gives each VPC its source ports. The
    /// counts begin anew if the table isn't there, or is another transitd's.
    pub fn limit(&mut self, pods: PodVpcs) -> Result<(), NetfilterError> {
        let ports = self.share_ports(&pods);
        let limited = Limited { pods, ports };
        let text = match self.written_limits.take() {
            Some(written) => limits::changes(&written, &limited),
            None => limits::ruleset(&limited, self.own.dns),
        };
        if !text.is_empty() {
            self.nft.write(&text)?;
        }
        self.written_limits = Some(limited);
        Ok(())
    }

    /// Has the node's own stack lead to pods whom their ingress policies accept. A set that the kernel refuses, or that
    /// nft is late with, accepts nobody. Table `inet thuban` may lead to the pods after that.
    pub fn admit(&mut self, mut wanted: Admission) -> Result<(), NetfilterError> {
        self.refused_sets.retain(|set| wanted.sets.contains_key(set));
        wanted.sets.retain(|set, _| !self.refused_sets.contains(set));
        if self.written_admission.as_ref() == Some(&wanted) {
            return Ok(());
        }
        let written = self.written_admission.take();
        let changes = written.and_then(|written| policy::changes(&written, &wanted));
        let text = changes.unwrap_or_else(|| policy::ruleset(&wanted));
        self.written_admission = match self.nft.write(&text) {
            Err(error @ (NetfilterError::Refused(_) | NetfilterError::Late { .. })) => {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "ingress policies for clients outside could not be written at once, each set is tried by itself"
                );
                Some(self.admit_each(wanted)?)
            }
            written => written.map(|()| Some(wanted))?,
        };
        Ok(())
    }

    /// Closes all pods with an ingress set, then opens them by one set after the other, as far as the kernel takes it.
    /// Begins with the smallest set, so that a set which takes too long keeps no smaller one closed.
    fn admit_each(&mut self, wanted: Admission) -> Result<Admission, NetfilterError> {
        let quick = Nft {
            patience: self.nft.patience.min(SET_TIMEOUT),
            ..self.nft.clone()
        };
        let mut written = Admission {
            pods: wanted.pods,
            rejecting: wanted.rejecting,
            ..Admission::default()
        };
        quick.write(&policy::ruleset(&written))?;
        let mut sets: Vec<_> = wanted.sets.into_iter().collect();
        sets.sort_by_cached_key(|(_, outside)| outside.cost());
        let mut late = 0;
        for (set, outside) in sets {
            let mut more = written.clone();
            more.sets.insert(set, outside);
            let text = policy::changes(&written, &more).unwrap_or_default();
            let tried = (late < MAX_LATE_SETS).then(|| quick.write(&text));
            match tried.transpose() {
                Ok(Some(())) => written = more,
                Err(error) if !matches!(error, NetfilterError::Refused(_) | NetfilterError::Late { .. }) => {
                    return Err(error);
                }
                // Refused, late, or not tried.
                failed => {
                    late += usize::from(matches!(failed, Err(NetfilterError::Late { .. })));
                    let (vni, id) = set;
                    warn!(%vni, set = %id, "a set of ingress policies accepts no client outside, because of nft");
                    self.refused_sets.insert(set);
                }
            }
        }
        if late > 0 {
            // The kernel may have obeyed an nft that was ended.
            self.nft.write(&policy::ruleset(&written))?;
        }
        Ok(written)
    }

    fn share_ports(&mut self, pods: &PodVpcs) -> VpcPorts {
        let Some((first, last)) = self.own.pod_ports else {
            return VpcPorts::new();
        };
        let vnis = limits::vnis(pods);
        self.shares.follow(&vnis);
        let shares = &self.shares;
        self.shares_file.keep(|| shares.clone());
        let all = first..=last;
        let range = |vni| (vni, shares.range(vni, &all));
        vnis.into_iter().map(range).collect()
    }

    /// Has the next [`Self::set`] write the table anew, whatever is in it.
    pub fn doubt(&mut self) {
        self.written = None;
    }

    /// Does what [`Self::doubt`] does, for [`Self::protect_port`].
    pub fn doubt_overlay_port(&mut self) {
        self.written_overlay_port = None;
    }

    /// Does what [`Self::doubt`] does, for [`Self::limit`].
    pub fn doubt_limits(&mut self) {
        self.written_limits = None;
    }

    /// Does what [`Self::doubt`] does, for [`Self::admit`].
    pub fn doubt_admission(&mut self) {
        self.written_admission = None;
    }

    /// Brings the table in line with its text ([`ruleset::ruleset`]), with a lease of tenants' ports. Runs nft if the
    /// text changed. That takes some milliseconds, or as long as the kernel's lock of nftables is held.
    pub fn set(&mut self, text: String, lease_until: u64) -> Result<(), NetfilterError> {
        if self.written.as_ref() == Some(&text) {
            return Ok(());
        }
        self.written = None;
        let lease = node_ports::elements(lease_until, boot::nanoseconds());
        let new = format!("{text}{}", lease.as_deref().unwrap_or_default());
        let replaced = |removal: String| self.nft.write(&format!("{removal}{new}"));
        let has_clients = affinity::has_clients(&text);
        let there = if has_clients || self.has_clients {
            objects(&self.nft).unwrap_or_default()
        } else {
            Vec::new()
        };
        let old = affinity::Old::new(&there, &text);
        match old.removal().map(&replaced) {
            None => replaced(affinity::removal())?,
            // Without the clients it may be possible.
            Some(Err(NetfilterError::Refused(why))) => {
                warn!(
                    why,
                    "the kernel refused to keep the clients of Services with session affinity"
                );
                replaced(affinity::removal())?;
            }
            Some(written) => written?,
        }
        self.has_clients = has_clients;
        for place in old.datagram_places() {
            conntrack::forget_datagrams(place).map_err(NetfilterError::Conntrack)?;
        }
        self.lease = match lease {
            Some(_) => Told::Until(lease_until),
            None => Told::Nothing,
        };
        self.written = Some(text);
        Ok(())
    }

    /// Whether the kernel may still lead new connections to tenants' ports, by whatever rules it has. `lease`: the
    /// longest.
    pub fn may_lead(&self, lease: Duration) -> bool {
        let until = match self.lease {
            Told::Nothing => 0,
            Told::Unknown => self.begun.saturating_add(lease.as_nanos() as u64),
            Told::Until(until) => until,
        };
        boot::nanoseconds() < until
    }

    /// Extends the lease of tenants' ports to that time if this makes it longer by `step` or more. Ends the lease when
    /// it is over, also when it is over only by a clock that went on while the kernel's stood still.
    pub fn renew(&mut self, lease_until: u64, step: Duration) -> Result<(), NetfilterError> {
        let now = boot::nanoseconds();
        let is_over = lease_until <= now;
        let is_due = match self.lease {
            Told::Nothing => !is_over,
            Told::Unknown => true,
            Told::Until(told) => is_over || lease_until.saturating_sub(told) >= step.as_nanos() as u64,
        };
        if is_due {
            self.nft.write(&node_ports::renewal(lease_until, now))?;
            self.lease = if is_over {
                Told::Nothing
            } else {
                Told::Until(lease_until)
            };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use thuban_rows::builders;

    use super::nft::tests::Played;
    use super::*;
    use crate::attachments::store::Owner;
    use crate::program::policy::Outside;

    fn netfilter(played: &Played) -> Netfilter {
        let own = OwnAddresses {
            dns: None,
            underlay: Ipv4Addr::LOCALHOST,
            pod_ports: None,
        };
        let owner = Owner {
            node: "node".into(),
            boot_id: "boot".into(),
        };
        Netfilter::new(
            played.nft.clone(),
            own,
            BootFile::new(played.folder.join("ports"), owner),
        )
    }

    /// Returns a pod with a set of each number. Sets with greater numbers are larger.
    fn admission(numbers: std::ops::RangeInclusive<u8>) -> Admission {
        let set = |number| (builders::VNI, builders::policy_id(number));
        let pods = numbers.clone().map(|number| {
            let pod = Ipv4Addr::new(10, 0, 0, number);
            (std::net::IpAddr::V4(pod), set(number.into()))
        });
        let sets = numbers.map(|number| {
            let ports = (0..u32::from(number)).map(|n| (2 * n, 2 * n));
            let outside = Outside {
                rest: ports.collect(),
                ranges: Vec::new(),
            };
            (set(number.into()), Arc::new(outside))
        });
        Admission {
            pods: pods.collect(),
            rejecting: BTreeSet::new(),
            sets: sets.collect::<BTreeMap<_, _>>(),
        }
    }

    fn numbers<'a>(sets: impl Iterator<Item = &'a policy::Set>) -> Vec<u32> {
        sets.map(|(_, id)| id.get()).collect()
    }

    /// A played nft hangs at the chain of a set that this pattern of the shell matches.
    fn hanging(name: &str, pattern: &str) -> Played {
        Played::new(
            name,
            &format!(
                "text=$(cat); echo run >> \"${{0%/*}}/runs\"\n\
                 case \"$text\" in *\"chain set-7-\"{pattern}\"-0 {{\"*) exec sleep 600;; esac"
            ),
        )
    }

    #[test]
    fn a_set_that_nft_is_late_with_is_closed_alone() {
        let played = hanging("late-set", "000008");
        let mut netfilter = netfilter(&played);
        netfilter.admit(admission(7..=9)).unwrap();
        let written = netfilter.written_admission.as_ref().unwrap();
        assert_eq!(numbers(written.sets.keys()), [7, 9]);
        assert_eq!(written.pods.len(), 3);
        assert_eq!(numbers(netfilter.refused_sets.iter()), [8]);
        let runs = || std::fs::read_to_string(played.folder.join("runs")).unwrap();
        // All at once, none, each, and the whole without the late one.
        assert_eq!(runs().lines().count(), 6);
        netfilter.admit(admission(7..=9)).unwrap();
        assert_eq!(runs().lines().count(), 6, "it is not tried again");
    }

    #[test]
    fn larger_sets_than_some_late_ones_are_not_tried() {
        let played = hanging("late-sets", "00000[2-9]");
        let mut netfilter = netfilter(&played);
        netfilter.admit(admission(1..=9)).unwrap();
        let written = netfilter.written_admission.as_ref().unwrap();
        assert_eq!(numbers(written.sets.keys()), [1]);
        assert_eq!(netfilter.refused_sets.len(), 8);
        let runs = std::fs::read_to_string(played.folder.join("runs")).unwrap();
        assert_eq!(runs.lines().count(), 1 + 1 + 1 + MAX_LATE_SETS + 1);
    }
}
