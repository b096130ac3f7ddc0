//! Reasons that lbaasd and cidrd give.

super::reasons! {
    "ServiceNotFound", "Vip":
        "the namespace has no such Service"
        => "create the Service";
    "ServiceNotServed", "Vip":
        "the Service has another type or class, or lbaasd did not make the Vip for it"
        => "give the Vip another name, or the Service the class thuban.dev/vip";
    "NameTaken", "Vip":
        "a Service that is not the Vip's has its name, or somebody else has its name in DNS"
        => "choose another name";
    "ServiceIsDerived", "Vip":
        "lbaasd created the Service for another Vip"
        => "name the Service that the other Vip names";
    "NoSelector", "Vip":
        "the Service selects no pods, or is an ExternalName"
        => "name a Service with a selector";
    "PortNotFound", "Vip":
        "the Service has no such port and protocol"
        => "choose a port that the message lists";
    "ProfileNotFound", "Vip":
        "the namespace has no such VipProfile"
        => "create the VipProfile";
    "FamilyNotServed", "Vip":
        "the Service lacks a family of spec.ipFamilies"
        => "add the family to the Service";
    "ServiceRefused", "Vip":
        "the API server refuses the Vip's Service, for example because of a quota"
        => "read the message";
    "ServiceKeepsAddresses", "Vip":
        "the Vip was deleted with --cascade=orphan, and its Service keeps the addresses of a private pool"
        => "delete the Service, or its annotation thuban.dev/service-ip";
    "SourceRangesNotServed", "Vip":
        "a VipProfile has sourceRanges, but no clients outside reach the addresses of a private pool"
        => "remove the VipProfile from spec.profiles, and use a NetworkPolicy";
    "PoolIsPrivate", "Vip":
        "the IpPool that a Service asks for is private, and lbaasd gives a Service itself only public addresses"
        => "remove the annotation thuban.dev/ip-pool, and make a Vip that names the Service and the pool";
    "NeedsHaproxy", "Vip":
        "a VipProfile has a field that only HAProxy serves, and the pool has another driver"
        => "name an IpPool with the driver Haproxy in spec.pool, or remove the field that the message names";
    "NeedsVip", "Vip":
        "the IpPool that a Service asks for has the driver Haproxy, which serves only Services that follow from a Vip"
        => "remove the annotation thuban.dev/ip-pool, and make a Vip that names the Service and the pool";
    "ProtocolNotServed", "Vip":
        "HAProxy takes TCP alone, and the Vip has a port of another protocol"
        => "list the TCP ports in spec.ports, or name a pool with the driver Xdp";
    "TooManyPorts", "Vip":
        "HAProxy serves at most 16 ports of a Vip"
        => "list fewer ports in spec.ports, and make another Vip for the others";
    "SecretNotFound", "Vip":
        "the namespace has no such Secret, so no connection gets a certificate"
        => "create the Secret of type kubernetes.io/tls";
    "SecretUnreadable", "Vip":
        "lbaasd may not read the Secret of a VipProfile's ssl"
        => "give lbaasd the right by the commands that the message prints";
    "NotRead", "Vip":
        "lbaasd has not read the Secret of a VipProfile's ssl yet"
        => "wait some seconds; if it stays, look at lbaasd's log and at the API server";
    "CertificateInvalid", "Vip":
        "the Secret has another type than kubernetes.io/tls, or its key and certificate don't fit or exceed 32 KiB"
        => "correct the Secret; until then nodes use the certificate that they have";
    "NoPool", "Vip":
        "no public IpPool admits the namespace and has a free address of each family"
        => "create an IpPool, or change allowedNamespaces or cidrs of one";
    "Exhausted", "Vip":
        "the pool has no free address"
        => "name another pool, or append a range to the pool";
    "NamespaceNotAllowed", "Vip":
        "the pool does not admit the namespace"
        => "name another pool, or ask the pool's owner";
    "CidrdAway", "Vip":
        "cidrd does not answer; the Vip keeps the addresses that it has"
        => "look at the pods of cidrd in the namespace of Thuban";
    "NoNode", "Vip":
        "no BgpPeer selects a node that serves the Service, or no such node has the subnet of an address of L2"
        => "look at nodeSelector of the BgpPeers or at the nodes' subnets, and at the backends of the Service";
    "MembersFail", "Vip":
        "some backends fail spec.healthCheck and get no new connections"
        => "look at status.members, and at the pods";
    "AllMembersFail", "Vip":
        "all backends fail spec.healthCheck; so all get new connections"
        => "look at status.members: are port and path of the check right?";
    "NoMembers", "Vip":
        "no backend is ready, or the check has no effect because nodes' own stacks serve the addresses"
        => "look at the Service's pods, at its externalTrafficPolicy, and at its condition thuban.dev/Front";
    "NotAnnounced", "Vip":
        "no node has announced the addresses yet, so the name is not published"
        => "look at the condition Announced";
    "NoZone", "Vip":
        "no DnsZone admits the namespace and the name"
        => "choose a name in a zone, or ask an administrator";
    "ServerAway", "Vip, DnsZone":
        "the DNS server can't be reached, or does not answer in time"
        => "look at the server, and at the conditions of the DnsZone";
    "KeyRefused", "Vip, DnsZone":
        "the DNS server does not accept the key"
        => "compare name, algorithm and secret of the key with those of the server";
    "ClockDiffers", "Vip, DnsZone":
        "the clocks of the DNS server and of lbaasd differ by more than 300 s"
        => "set the clocks";
    "Refused", "Vip, DnsZone":
        "the key may not write the zone"
        => "allow the key to write the zone at the DNS server";
    "AnswerInvalid", "Vip, DnsZone":
        "the answer of the DNS server is not signed by the key, or is unreadable"
        => "look at the server's configuration of the key";
    "PasswordNotFound", "BgpPeer":
        "the Secret of spec.passwordSecret does not exist in the namespace thuban-bgp, so nodes set up no session"
        => "create the Secret with the key password";
    "PasswordInvalid", "BgpPeer":
        "the Secret of spec.passwordSecret has another type, or no usable password, so nodes set up no session"
        => "correct the Secret: type Opaque or kubernetes.io/basic-auth, 1 to 80 bytes without line breaks";
    "PasswordUnreadable", "BgpPeer":
        "a node can't read the Secret of spec.passwordSecret"
        => "look at the log of the node's speaker, and at the rights of its account in the namespace thuban-bgp";
    "SecretInvalid", "Vip, DnsZone":
        "the Secret of the DnsZone is missing or unusable"
        => "correct the Secret that the message names";
    "SpecInvalid", "Vip, DnsZone":
        "a field of the DnsZone is unusable"
        => "correct the field that the message names";
}
