"""Top-level domains of e-mail addresses.

Anything with a dot after an `@` looks like an address: `icon@2x.png`, `lodash@4.17.21.js`, `y = a@b.transpose`. So the
last label must be a domain of IANA's root zone, or one that is reserved for private networks and examples. Domains of
single companies are left out, and so are `zip` and `mov`, which end more files than addresses.
"""

COUNTRIES = (
    "ac ad ae af ag ai al am ao aq ar as at au aw ax az ba bb bd be bf bg bh bi bj bm bn bo br bs bt bw by bz ca cd cf "
    "cg ch ci ck cl cm cn co cr cu cv cw cx cy cz de dj dk dm do dz ec ee eg er es et eu fi fj fk fm fo fr ga gb gd ge "
    "gf gg gh gi gl gm gn gp gq gr gs gt gu gw gy hk hm hn hr ht hu id ie il im in io iq ir is it je jm jo jp ke kg kh "
    "ki km kn kp kr kw ky kz la lb lc li lk lr ls lt lu lv ly ma mc me mg mh mk mn mo mp mq mr ms mt mu mv mw mx my mz "
    "na nc ne nf ng ni nl no np nr nu nz om pa pe pf pg ph pk pm pn pr pt pw qa re ro ru rw sa sb sc sd se sg si sk sl "
    "sm sn sr ss st su sv sx sy sz tc td tf tg th tj tk tl tm tn to tr tt tv tw tz ua ug uk us uy uz va vc ve vg vi vn "
    "vu wf ws ye yt za zm zw"
)
ALSO_FILES = "cc md ml mm pl ps py rs sh so"
"""Countries whose domain is also a suffix of files."""
GENERIC = (
    "academy accountant accountants actor adult aero africa agency airforce amsterdam apartments app archi army arpa "
    "art asia associates attorney auction audio auto autos baby band bank bar barcelona bargains bayern beauty beer "
    "berlin best bet bible bid bike bingo bio biz black blog blue boats book boston bot boutique box broker brussels "
    "build builders business buzz cab cafe cam camera camp capetown capital car cards care career careers cars casa "
    "cash casino cat catering center ceo channel charity chat cheap christmas church city claims cleaning click clinic "
    "clothing cloud club coach codes coffee college cologne com community company computer condos construction "
    "consulting contact contractors cooking cool coop corsica country coupons courses credit cricket cruises cymru "
    "dance date dating day deals degree delivery democrat dental dentist design dev diamonds diet digital direct "
    "directory discount doctor dog domains download durban earth eco edu education email energy engineer engineering "
    "enterprises equipment estate eus events exchange expert exposed express fail faith family fan fans farm fashion "
    "feedback film finance financial fish fishing fit fitness flights florist flowers foo football forsale forum "
    "foundation frl fun fund furniture futbol fyi gal gallery game games garden gay gift gifts gives giving glass "
    "global gmbh gold golf gov graphics gratis green gripe group guide guitars guru hair hamburg haus health "
    "healthcare help helsinki hiphop hiv hockey holdings holiday homes horse hospital host hosting house how icu immo "
    "immobilien inc industries info ink institute insurance insure int international investments irish istanbul jetzt "
    "jewelry jobs juegos kaufen kids kim kitchen kiwi koeln kyoto land lat latino law lawyer lease legal lgbt life "
    "lighting limited limo link live living llc loan loans lol london lotto love ltd luxe luxury madrid maison makeup "
    "management market marketing markets mba media melbourne meme memorial men menu miami mil mobi moda moe mom money "
    "monster mortgage moscow motorcycles museum nagoya name navy net network new news nexus ngo ninja nrw nyc observer "
    "okinawa one ong onl online ooo org organic osaka page paris partners parts party pet pharmacy phd photo "
    "photography photos physio pics pictures pink pizza place plumbing plus poker porn post press pro productions prof "
    "promo properties property protection pub quebec quest racing radio realestate realtor realty recipes red rehab "
    "reise reisen rent rentals repair report republican rest restaurant review reviews rich rio rip rocks rodeo rsvp "
    "rugby ruhr run saarland sale salon sarl save school schule science scot security services sex sexy shoes shop "
    "shopping show singles site ski skin soccer social software solar solutions spa space sport srl store stream "
    "studio study style sucks supplies supply support surf surgery swiss sydney systems taipei tattoo tax taxi team "
    "tech technology tel tennis theater theatre tickets tienda tips tires tirol today tokyo tools top tours town toys "
    "trade trading training travel tube university uno vacations vegas ventures versicherung vet viajes video villas "
    "vin vip vision vlaanderen vodka vote voting voto voyage wales watch webcam website wed wedding wien wiki win wine "
    "work works world wtf xin xxx xyz yachts yoga yokohama zone zuerich"
)
OTHER_SCRIPTS = "ελ ευ бг бел дети ею католик ком мкд мон москва онлайн орг рус рф сайт срб укр қаз"
PRIVATE = "corp example home internal intranet invalid lan local localdomain localhost test"
"""Domains that no registry gives out: networks of a company or a home, and examples (RFC 2606, RFC 6762)."""
