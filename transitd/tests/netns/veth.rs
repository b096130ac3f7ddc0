//! The steps of making a veth.

use std::fs::File;
use std::net::Ipv4Addr;

use transitd::netlink::veth::{VethPlan, create, create_and_look};
use transitd::netlink::{NetlinkError, connect};

use crate::rig::{Rig, base_rows, in_namespace};

#[test]
fn a_veth_that_is_made_but_not_seen_is_taken_away_again() {
    let mut rig = Rig::prepare(base_rows());
    let netns = rig.pod_namespace("p1");
    let (node, host) = (rig.node().to_owned(), "thb0123456789a");
    in_namespace(&node, move || {
        let plan = VethPlan {
            host_interface: host.into(),
            pod_interface: "eth0".into(),
            pod_mac: [2, 0, 10, 0, 1, 5],
            mtu: 1450,
            address: Ipv4Addr::new(10, 0, 1, 5),
            address6: None,
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let (handle, pod) = (connect().unwrap(), File::open(&netns).unwrap());
            let is_there = || nix::net::if_::if_nametoindex(host).is_ok();
            for answer in [None, Some(NetlinkError::NoInterface("it".into()))] {
                let look = async |_: &_, name: &str| {
                    assert!(is_there(), "{name} was made");
                    answer.map_or(Ok(None), Err)
                };
                assert!(create_and_look(&handle, &plan, &pod, look).await.is_err());
                assert!(!is_there());
            }
            let index = create(&handle, &plan, &pod).await.unwrap();
            assert_eq!(nix::net::if_::if_nametoindex(host), Ok(index));
            assert!(matches!(
                create(&handle, &plan, &pod).await,
                Err(NetlinkError::InterfaceExists(_))
            ));
            assert!(is_there(), "the one that is there is left alone");
        });
    });
    assert!(rig.in_pod("p1", "ip link show eth0"));
}
