//! Chooses the uplink's transit hook, once at start. The choice depends on what the NIC does, never on the droplet's
//! roles.

use clap::ValueEnum;
use tracing::warn;

use super::hook::Hook;
use super::links::Links;
use super::pins::LinkingError;
use crate::netlink::{NetlinkError, ethtool, virtio};

/// Where the program transit runs on the uplink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransitHookChoice {
    /// XDP. tc if the NIC refuses XDP, or is a veth whose frames arrive whole or are aggregated.
    Auto,
    /// XDP. transitd does not start if the NIC refuses it.
    Xdp,
    /// tc, on every NIC.
    Tc,
}

/// Where the agent runs on a pod's veth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AgentHook {
    /// tc, the kernel's traffic control.
    Tc,
    /// XDP, if transit runs at XDP. Otherwise tc.
    Xdp,
}

/// Where transit runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransitHook {
    /// XDP checks, bounces, divides and decapsulates; the tc program behind it delivers.
    Xdp,
    /// tc does all of it: whole GSO frames pass.
    Tc,
}

impl TransitHook {
    pub fn name(self) -> &'static str {
        match self {
            Self::Xdp => "xdp",
            Self::Tc => "tc",
        }
    }
}

/// The known properties of a NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nic {
    pub is_veth: bool,
    /// Whole GSO frames arrive.
    pub passes_gso: bool,
    /// The driver takes a program at native XDP and shows it no frame.
    pub hides_frames: bool,
}

impl Nic {
    /// Returns the properties of a NIC. `sends_gso`: whether the NIC may be given GSO frames to send. Only for a veth
    /// does this tell whether they arrive, because its other end has the same features as a rule. Other NICs, bonds
    /// and VLANs segment in hardware and receive segments.
    fn new(driver: &str, sends_gso: bool, hides_frames: bool) -> Self {
        let is_veth = driver == "veth";
        Self {
            is_veth,
            passes_gso: is_veth && sends_gso,
            hides_frames,
        }
    }
}

/// Returns the hook that `auto` prefers for a NIC. A veth gets tc if frames arrive whole or are aggregated before,
/// because XDP copies each frame on a veth. A NIC that shows XDP no frames gets tc too, so that frames are aggregated.
/// Everything else gets XDP.
pub fn preferred(choice: TransitHookChoice, nic: &Nic, aggregates: bool) -> TransitHook {
    match choice {
        TransitHookChoice::Tc => TransitHook::Tc,
        TransitHookChoice::Auto if nic.is_veth && (nic.passes_gso || aggregates) => TransitHook::Tc,
        TransitHookChoice::Auto if nic.hides_frames => TransitHook::Tc,
        TransitHookChoice::Auto | TransitHookChoice::Xdp => TransitHook::Xdp,
    }
}

/// Returns where agents run. At XDP they redirect to the NIC, which must take XDP frames. That is proven only where
/// transit is at XDP.
pub fn agent(wanted: AgentHook, transit: TransitHook) -> AgentHook {
    if wanted == AgentHook::Xdp && transit == TransitHook::Tc {
        warn!("agents stay at tc: at XDP they need a NIC with transit at XDP");
        return AgentHook::Tc;
    }
    wanted
}

/// Looks at the NIC.
pub fn examine(uplink: &str) -> Result<Nic, NetlinkError> {
    let sends_gso = ethtool::is_on(uplink, "tx-tcp-segmentation")?
        || ethtool::is_on(uplink, "tx-generic-segmentation")?
        || ethtool::is_on(uplink, "tx-udp_tnl-segmentation")?;
    let driver = ethtool::driver(uplink)?;
    let hides_frames = driver == virtio::DRIVER && virtio::hides_frames_from_xdp(uplink);
    Ok(Nic::new(&driver, sends_gso, hides_frames))
}

/// Attaches transit. If native XDP is refused and was not demanded, tc does everything.
pub fn attach(
    links: &mut Links,
    choice: TransitHookChoice,
    wanted: TransitHook,
    uplink: &str,
) -> Result<TransitHook, LinkingError> {
    // tc comes first: the tc program must be there for the packets that XDP passes on.
    links.ensure_or_keep(Hook::TransitTc, uplink)?;
    if wanted == TransitHook::Xdp {
        match links.ensure_or_keep(Hook::TransitXdp, uplink) {
            Ok(()) => return Ok(TransitHook::Xdp),
            Err(error) if choice == TransitHookChoice::Auto => {
                warn!(
                    uplink,
                    error = &error as &dyn std::error::Error,
                    "no native XDP on the uplink, transit runs at tc"
                );
            }
            Err(error) => return Err(error),
        }
    }
    links.give_up(Hook::TransitXdp, uplink)?;
    Ok(TransitHook::Tc)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_are_at_xdp_only_where_transit_is() {
        assert_eq!(agent(AgentHook::Xdp, TransitHook::Tc), AgentHook::Tc);
        assert_eq!(agent(AgentHook::Xdp, TransitHook::Xdp), AgentHook::Xdp);
        assert_eq!(agent(AgentHook::Tc, TransitHook::Xdp), AgentHook::Tc);
    }

    #[test]
    fn only_a_veths_own_features_say_that_gso_frames_arrive() {
        assert!(Nic::new("veth", true, false).passes_gso && !Nic::new("veth", false, false).passes_gso);
        for driver in ["virtio_net", "mlx5_core", "bonding", "802.1Q VLAN Support"] {
            assert!(!Nic::new(driver, true, false).passes_gso, "{driver}");
        }
    }

    #[test]
    fn a_veth_gets_tc_where_frames_come_whole_and_others_xdp() {
        let auto = TransitHookChoice::Auto;
        let nic = |is_veth, passes_gso| Nic {
            is_veth,
            passes_gso,
            hides_frames: false,
        };
        assert_eq!(preferred(auto, &nic(true, true), false), TransitHook::Tc);
        assert_eq!(preferred(auto, &nic(true, false), true), TransitHook::Tc);
        assert_eq!(preferred(auto, &nic(true, false), false), TransitHook::Xdp);
        assert_eq!(preferred(auto, &nic(false, true), true), TransitHook::Xdp);
        let hiding = Nic::new("virtio_net", true, true);
        assert_eq!(preferred(auto, &hiding, true), TransitHook::Tc);
        assert_eq!(preferred(auto, &hiding, false), TransitHook::Tc);
        let forced = preferred(TransitHookChoice::Xdp, &nic(true, true), true);
        assert_eq!(forced, TransitHook::Xdp);
        assert_eq!(
            preferred(TransitHookChoice::Tc, &nic(false, false), false),
            TransitHook::Tc
        );
    }
}
